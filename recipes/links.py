"""A slow network on this machine: two network namespaces, a cable between them, and a limit on its rate.

    with Link("100mbit") as link:
        launch(function, 2, prepare=link.enter)

Needs Linux, root, and the commands `ip` and `tc`. Everything is torn down at the end, whatever happens inside. The
limit is a token bucket (`tc ... tbf`) on both ends of a veth pair, so each direction has the full rate. What `Link`
leaves alone: everything outside its two namespaces.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field

__all__ = ["Link", "unavailable"]

_INTERFACE = "lowcomm0"  # of both ends: one setting of gloo's interface serves both
_CLONE_NEWNET = 0x40000000
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


def unavailable() -> str:
    """Why links cannot be made here; empty where they can.

    Root in a container may lack the right, so it is tried.
    """
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        return f"the command {missing[0]!r} is not installed"
    try:
        with Link("1gbit"):
            return ""
    except RuntimeError as error:
        return str(error)


def bits_per_second(rate: str) -> float:
    """A rate as `tc` writes it.

    >>> bits_per_second("100mbit"), bits_per_second("1gbit")
    (100000000.0, 1000000000.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"a rate looks like 100mbit or 1gbit but is: {rate!r}")
    return float(match[1]) * _UNITS[match[2]]


@dataclass
class Link:
    """Two namespaces, one for each rank, joined by a cable of limited rate; a context manager.

    Args:
        rate: for example "100mbit"; in each direction.
        delay_ms: one way. Default 0.

    Raises:
        ValueError: the rate is not one.
        RuntimeError: the namespaces cannot be made, with the reason.
    """

    rate: str
    delay_ms: float = 0.0
    names: list[str] = field(default_factory=list, init=False)

    def __enter__(self) -> Link:
        rate = bits_per_second(self.rate)
        # At least 64 KiB, what the kernel hands over in one piece; at most 2 ms of the rate comes for free.
        burst = max(1 << 16, int(rate / 8 * 0.002))
        self.names = [f"lowcomm-{os.getpid()}-{end}" for end in range(2)]
        try:
            for name in self.names:
                _run("ip", "netns", "add", name)
            first, second = self.names
            _run("ip", "-n", first, "link", "add", _INTERFACE, "type", "veth", "peer", _INTERFACE, "netns", second)
            for end, name in enumerate(self.names):
                _run("ip", "-n", name, "link", "set", "lo", "up")
                _run("ip", "-n", name, "address", "add", f"10.213.77.{end + 1}/24", "dev", _INTERFACE)
                self.set_up(end)
                self._limit(name, burst)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def _limit(self, name: str, burst: int) -> None:
        limit = ("tbf", "rate", self.rate, "burst", str(burst), "latency", "400ms")
        if not self.delay_ms:
            _run("tc", "-n", name, "qdisc", "add", "dev", _INTERFACE, "root", *limit)
            return
        delay = ("netem", "delay", f"{self.delay_ms}ms", "limit", "100000")
        _run("tc", "-n", name, "qdisc", "add", "dev", _INTERFACE, "root", "handle", "1:", *delay)
        _run("tc", "-n", name, "qdisc", "add", "dev", _INTERFACE, "parent", "1:", "handle", "2:", *limit)

    def enter(self, rank: int) -> None:
        """Move this process, before it has other threads that matter, to the end of `rank`."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.names[rank]}") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {self.names[rank]}")
        os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE

    def set_up(self, end: int) -> None:
        """Plug the cable in at one end."""
        _run("ip", "-n", self.names[end], "link", "set", _INTERFACE, "up")

    def set_down(self, end: int) -> None:
        """Pull the cable out at one end."""
        _run("ip", "-n", self.names[end], "link", "set", _INTERFACE, "down")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
