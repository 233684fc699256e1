"""Trainers that people use (Accelerate, Lightning, Hugging Face): each trains, saves and resumes bit for bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lowcomm.compress import Int8
from lowcomm.optim import DiLoCo
from ranks import run_ranks
from torch import Tensor, nn

SAMPLES = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def optimizer_of(model: nn.Module) -> DiLoCo:
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    return DiLoCo(inner, sync_every=3, compress=Int8(block=16))


def snapshot(model: nn.Module, optimizer: Any) -> list[Tensor]:
    state = optimizer.state_dict()["state"]
    tensors = [entry[name] for entry in state.values() for name in ("anchor", "outer_momentum_buffer", "residual")]
    return [t.detach().clone() for t in (*model.parameters(), *tensors)]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")

    def train(accelerator: Any, model: nn.Module, optimizer: Any, first: int, last: int) -> None:
        for step in range(first, last):
            accelerator.backward(model(SAMPLES[step % 8 :: 8]).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    accelerator = accelerate.Accelerator(cpu=True)
    model = model_of()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    train(accelerator, model, optimizer, 0, 4)
    accelerator.save_state(str(tmp_path / "four"))
    train(accelerator, model, optimizer, 4, 10)
    expected = snapshot(model, optimizer.optimizer)
    assert optimizer.optimizer.num_syncs == 3
    accelerator.load_state(str(tmp_path / "four"))
    train(accelerator, model, optimizer, 4, 10)
    assert same(snapshot(model, optimizer.optimizer), expected)


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed: pip install lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of()

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss: Tensor = self.model(batch).square().mean()
            return loss

        def configure_optimizers(self) -> DiLoCo:
            return optimizer_of(self.model)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(SAMPLES, batch_size=8)  # type: ignore[arg-type]

    def fit(epochs: int, resume: str | None = None) -> tuple[Any, Any]:
        module = Module()
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=str(tmp_path),
        )
        trainer.fit(module, ckpt_path=resume, weights_only=True)
        return trainer, module

    trainer, _ = fit(1)
    path = str(tmp_path / "one.ckpt")
    trainer.save_checkpoint(path)
    trainer, module = fit(2)
    expected = snapshot(module, trainer.optimizers[0])
    trainer, module = fit(2, path)
    assert trainer.optimizers[0].param_groups[0]["local_step"] == 16
    assert same(snapshot(module, trainer.optimizers[0]), expected)


def test_hugging_face_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate: pip install accelerate")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": self.model(x).square().mean()}

    def train(steps: int, resume: str | None = None) -> tuple[nn.Module, Any]:
        model = Model()
        optimizer = optimizer_of(model)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=steps,
            per_device_train_batch_size=8,
            save_steps=4,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            lr_scheduler_type="constant",
        )
        dataset = [{"x": row} for row in SAMPLES]
        trainer = transformers.Trainer(model, arguments, train_dataset=dataset, optimizers=(optimizer, None))
        trainer.train(resume_from_checkpoint=resume)
        return model, optimizer

    os.environ.setdefault("WANDB_DISABLED", "true")
    model, optimizer = train(8)
    expected = snapshot(model, optimizer)
    assert optimizer.num_syncs == 2
    model, optimizer = train(8, str(tmp_path / "checkpoint-4"))
    assert same(snapshot(model, optimizer), expected)


def _hugging_face(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    # as torchrun sets them
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    transformers = __import__("transformers")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": self.model(x).square().mean()}

    class LocalTrainer(transformers.Trainer):  # type: ignore[misc,name-defined]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.prepare_model = lambda model, **_: model

    apart: list[float] = []

    class Watch(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
            apart.append(next(model.parameters()).flatten()[0].item())

    model = Model()
    optimizer = optimizer_of(model)
    arguments = transformers.TrainingArguments(
        output_dir=f"{folder}/{rank}",
        max_steps=7,
        per_device_train_batch_size=8,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        lr_scheduler_type="constant",
    )
    dataset = [{"x": row} for row in SAMPLES]
    trainer = LocalTrainer(model, arguments, train_dataset=dataset, optimizers=(optimizer, None), callbacks=[Watch()])
    trainer.train()
    return {"values": apart, "syncs": optimizer.num_syncs}


def test_hugging_face_trainer_on_two_workers(tmp_path: Path) -> None:
    """As the guide says: without the trainer's own data parallelism workers differ between syncs only."""
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate: pip install accelerate")
    first, second = run_ranks(_hugging_face, 2, str(tmp_path))
    assert first["syncs"] == second["syncs"] == 2
    equal = [a == b for a, b in zip(first["values"], second["values"], strict=True)]
    assert equal == [False, False, True, False, False, True, False]
