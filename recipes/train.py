"""Train a small transformer on the Python standard library's source, or on any text: an ordinary torchrun script.

    torchrun --nproc-per-node 2 train.py

Across machines add --nnodes, --node-rank and --rdzv-endpoint. Copy this file and put your own model and data in.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lowcomm.compress import Int4
from lowcomm.optim import DiLoCo
from lowcomm.recipes.data import Batches, load_text
from lowcomm.recipes.model import ModelSettings, Transformer
from lowcomm.recipes.training import evaluate, inner_optimizer, schedule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", metavar="PATH", help="file or folder (default: the standard library)")
    parser.add_argument("--steps", type=int, default=400, help="inner steps (default: 400)")
    parser.add_argument("--batch", type=int, default=8, help="sequences per worker and step (default: 8)")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate (default: 2e-3)")
    parser.add_argument("--sync-every", type=int, default=20, help="inner steps between syncs (default: 20)")
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    text = load_text(options.text)
    model = Transformer(ModelSettings()).to(device)
    batches = iter(Batches(text.train, options.batch, model.settings.context, rank, world_size))

    inner = inner_optimizer(model, options.lr)
    optimizer = DiLoCo(inner, sync_every=options.sync_every, outer_lr=1.0, outer_momentum=0.3, compress=Int4())
    scheduler = schedule(optimizer, options.steps, warmup=options.steps // 10)

    for step in range(1, options.steps + 1):
        tokens, targets = next(batches)
        loss = F.cross_entropy(model(tokens.to(device)).flatten(0, 1), targets.to(device).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if rank == 0 and step % max(1, options.steps // 20) == 0:
            print(f"step {step}, loss {loss.item():.4f}, {optimizer.bytes_sent / 1e6:.2f} MB sent", flush=True)

    optimizer.flush()  # the workers agree
    loss_mean = evaluate(model, text.validation, 512, rank, world_size)
    if rank == 0:
        print(f"validation loss {loss_mean:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
