"""One step of many, inside the trainers of Lightning and Transformers themselves; where these are
not installed, `test_callbacks.py` calls the same hooks as they would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecornn.profiler import MemoryReport
from ecornn.profiler.callbacks import lightning_callback, transformers_callback

WIDTH, BATCH, STEPS, AT = 32, 512, 4, 2


def assert_is_of_a_step(report: MemoryReport, weights: int) -> None:
    kinds = report.by_kind()
    assert kinds["weights"] == weights
    assert kinds["optimizer state"] >= 2 * weights  # Adam's, which are there from the first step on
    assert kinds["feature maps"] >= BATCH * WIDTH * 4
    paths = {row.module for row in report.rows if row.kind == "feature maps"}
    assert any("second" in path for path in paths)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(torch.tanh(self.first(x))).square().mean()
        return found


@pytest.mark.parametrize("fails", [False, True])
def test_lightning(tmp_path: Path, fails: bool) -> None:
    lightning = pytest.importorskip("lightning")

    class Task(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = Layers()
            self.observed: list[int] = []

        def training_step(self, batch: Any, index: int) -> Tensor:
            self.observed.append(torch._C._len_torch_dispatch_stack())
            if fails and index == AT:
                raise KeyError("a step")
            found: Tensor = self.layers(batch)
            return found

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 1e-3)

    task, told = Task(), []
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[lightning_callback(AT, then=told.append)],
    )
    data = torch.utils.data.DataLoader(list(torch.randn(STEPS * BATCH, WIDTH)), batch_size=BATCH)
    if fails:
        with pytest.raises(KeyError, match="a step"):
            trainer.fit(task, data)
        assert task.observed == [0, 0, 1]
        assert torch._C._len_torch_dispatch_stack() == 0, "nothing is left behind"
        return
    trainer.fit(task, data)
    assert task.observed == [0, 0, 1, 0]
    (report,) = told
    assert_is_of_a_step(report, sum(w.nbytes for w in task.parameters()))


def test_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = Layers()
            self.observed: list[int] = []

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            self.observed.append(torch._C._len_torch_dispatch_stack())
            return {"loss": self.layers(x)}

    model, told = Model(), []
    callback = transformers_callback(AT, then=told.append)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    data = [{"x": one} for one in torch.randn(STEPS * BATCH, WIDTH)]
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=data, callbacks=[callback]
    )
    with callback:
        trainer.train()
    assert model.observed == [0, 0, 1, 0]
    (report,) = told
    assert_is_of_a_step(report, sum(w.nbytes for w in model.parameters()))
