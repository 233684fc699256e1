"""Receipts count what is handed to torch.distributed; overlap with other traffic; leaks."""

from __future__ import annotations

import gc
import os
import resource
import threading
import time

import torch
import torch.distributed as dist
from lowcomm.sync import AllReduce
from lowcomm.sync.frames import frame_bytes
from lowcomm.sync.peers import Peers
from ranks import run_ranks
from sync_codecs import ExactCodec, NonzeroCodec, SignCodec
from sync_emulation import bounds, emulate_all_gather, ordered_mean


def _vector(rank: int, n: int, t: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(31 * n + 1000 * t + rank))


class _Meter:
    """A process group that counts what is handed to it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.sent, self.received = group, 0, 0
        self.rank, self.size, self.name = group.rank, group.size, group.name

    def send(self, tensors: list[torch.Tensor], *where: int) -> object:
        self.sent += tensors[0].nbytes
        return self._group.send(tensors, *where)

    def recv(self, tensors: list[torch.Tensor], *where: int) -> object:
        self.received += tensors[0].nbytes
        return self._group.recv(tensors, *where)

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> object:
        self._both(2 * (self.size() - 1) * tensors[0].nbytes // self.size())
        return self._group.allreduce(tensors, options)

    def alltoall_base(self, out: torch.Tensor, mine: torch.Tensor, *rest: object) -> object:
        self._both(out.nbytes // self.size() * (self.size() - 1))
        return self._group.alltoall_base(out, mine, *rest)

    def _allgather_base(self, out: torch.Tensor, mine: torch.Tensor, options: object) -> object:
        self._both(out.nbytes - mine.nbytes)
        return self._group._allgather_base(out, mine, options)

    def _both(self, count: int) -> None:
        self.sent += count
        self.received += count


def _expected_payload(name: str, codec: object, n: int, world_size: int) -> int:
    """The traffic formulas: (N-1) F; 2 (N-1)/N F' with F' all slice frames; 2 (N-1)/N 4n."""
    if name == "dense":
        return 2 * (world_size - 1) * 4 * n // world_size
    if name == "all_gather":
        return (world_size - 1) * frame_bytes(codec.nbytes(n))
    start, stop = bounds(n, world_size, codec.block)[0]
    all_slices = world_size * frame_bytes(codec.nbytes(stop - start))
    return 2 * (world_size - 1) * all_slices // world_size


def _bytes_rank(rank: int, world_size: int) -> list[object]:
    """Point-to-point messages, collectives, and messages that are copied on the way as those of a GPU over gloo."""
    meter, rows, staged = _Meter(dist.group.WORLD), [], Peers.staged
    for point_to_point in (True, False, "staged"):
        Peers.staged = (lambda *_: True) if point_to_point == "staged" else staged
        for codec in (None, ExactCodec(), SignCodec(), NonzeroCodec()):
            for algorithm in ["auto"] if codec is None else ["auto", "all_gather", "two_phase"]:
                if algorithm == "two_phase" and not codec.requantizable:
                    continue
                reducer = AllReduce(codec=codec, feedback="auto", algorithm=algorithm)
                reducer._peers = Peers(meter, point_to_point)
                for n in (0, 1, world_size - 1, 100, 4097):
                    sent, received = meter.sent, meter.received
                    work = reducer.reduce(_vector(rank, n), bucket=n)
                    receipt = work.wait()
                    name = f"{point_to_point} {type(codec).__name__} {algorithm} {n}"
                    assert receipt.bytes_sent == meter.sent - sent, name
                    assert receipt.bytes_received == meter.received - received, name
                    assert receipt.header_bytes == (world_size - 1) * 65, name
                    assert receipt.payload_bytes == _expected_payload(receipt.algorithm, codec, n, world_size), name
                    rows.append((name, work.result))
    return rows


def test_receipts_count_what_is_sent() -> None:
    for world_size in (2, 3):
        outcomes = run_ranks(_bytes_rank, world_size)
        third = len(outcomes[0]) // 3
        for rows in outcomes:
            for way in (1, 2):
                for (name, result), (other_name, other) in zip(rows[:third], rows[way * third :], strict=False):
                    assert name.split()[1:] == other_name.split()[1:]
                    assert torch.equal(result, other), name


def _overlap_rank(rank: int, world_size: int) -> list[torch.Tensor]:
    """Two reducers and the user's own collectives share one process group while exchanges are in flight."""
    first = AllReduce(codec=SignCodec(), feedback="auto", algorithm="all_gather")
    second = AllReduce(codec=ExactCodec(), algorithm="two_phase")
    dense = AllReduce()
    original = Peers.isend

    def delayed(self: Peers, message: torch.Tensor, to: int, kind: int) -> object:
        time.sleep(0.002 * ((rank + to) % 3))  # the network is slow, and differently on every link
        return original(self, message, to, kind)

    Peers.isend = delayed
    works, own = [], []
    for t in range(8):
        works.append(first.start(_vector(rank, 50, t), bucket=0, round=t))
        works.append(second.start(_vector(rank, 40, t), bucket=t % 3, round=t))
        works.append(dense.start(_vector(rank, 30, t), round=t))
        mine = torch.tensor([float(rank + t)])
        dist.all_reduce(mine)
        own.append(mine)
        if t % 3 == 2:
            works.append(dense.reduce(_vector(rank, 20, t), round=t))
    order = list(range(len(works)))
    for index in order[::-1] if rank else order:  # waiting in any order
        works[index].wait()
    assert all(work.done() for work in works)
    return [work.result for work in works] + own


def test_many_exchanges_in_flight_beside_the_users_own() -> None:
    world_size = 3
    outcomes = run_ranks(_overlap_rank, world_size)
    residuals, expected = [torch.zeros(50)] * world_size, []
    for t in range(8):
        vectors = [_vector(rank, 50, t) for rank in range(world_size)]
        mean, residuals = emulate_all_gather(SignCodec(), vectors, residuals, step=t)
        expected.append(mean)
        expected.append(ordered_mean([_vector(rank, 40, t) for rank in range(world_size)], [1.0] * 3, 3.0))
        expected.append(None)
        if t % 3 == 2:
            expected.append(None)
    expected += [torch.tensor([float(3 * t + 3)]) for t in range(8)]
    for results in outcomes:
        for got, other, want in zip(results, outcomes[0], expected, strict=True):
            assert torch.equal(got, other)
            assert want is None or torch.equal(got, want)


def _soak_rank(rank: int, world_size: int) -> tuple[list[int], list[int], list[int]]:
    """(peak memory in KiB, threads, open files) at a few points of a long run."""
    memory, threads, files = [], [], []
    reducer = AllReduce(codec=ExactCodec(), feedback="auto", algorithm="all_gather", confirm=False)
    flat = torch.randn(40)
    for t in range(2000):
        if t % 400 == 399:
            gc.collect()
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
            threads.append(threading.active_count())
            files.append(len(os.listdir("/proc/self/fd")))
        work = reducer.start(flat, round=t, bucket=t % 2) if t % 2 else reducer.reduce(flat, round=t, bucket=t % 2)
        work.wait()
        flat = work.result
    return memory, threads, files


def test_two_thousand_exchanges_leak_nothing() -> None:
    for memory, threads, files in run_ranks(_soak_rank, 2):
        assert threads[0] == threads[-1] == 2
        assert files[0] == files[-1]
        assert memory[-1] - memory[0] < 2048, memory  # KiB


def test_the_helper_thread_ends_with_its_lane() -> None:
    from lowcomm.sync.lane import Lane

    class Nothing:
        ran = False

        def run(self) -> None:
            self.ran = True

        def publish(self) -> None:
            pass

    lane, task = Lane(), Nothing()
    lane.submit(task)
    thread = lane._thread
    while not task.ran:
        time.sleep(0.001)
    del lane
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()
