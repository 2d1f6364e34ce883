"""Train with Composer, save every 10 batches, and resume when started again."""

from pathlib import Path
from zipfile import is_zipfile

import torch
from composer import Trainer
from composer.models import ComposerModel
from composer.utils import dist, get_device

import savable_pipeline as sp
from savable_pipeline.trainers.composer import SavableData, eval_data
from task_encoders import LanguageModelingEncoder

run, device = Path("run"), "gpu" if torch.cuda.is_available() else "cpu"
settings = {
    "max_duration": "30ba",
    "eval_interval": "10ba",
    "eval_subset_num_batches": 5,
    "save_folder": str(run),
    "save_filename": "ba{batch}.pt",
    "save_latest_filename": None,
    "save_interval": "10ba",
    "save_overwrite": True,  # a file that was not written to its end
    "device": device,
}
encoder = LanguageModelingEncoder(max_length=64)
pipeline = sp.read("shards/").shuffle(100).encode(encoder).batch(4)


def make_loader() -> sp.SavableLoader:
    return sp.SavableLoader(pipeline, seed=7, num_workers=2)


def make_evaluation() -> sp.SavableLoader:
    once = sp.read("shards/", epochs=1).encode(encoder).batch(4)
    return sp.SavableLoader(once, seed=7, lanes=4, on_iter="restart")


class Model(ComposerModel):
    """Stands for yours."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Embedding(259, 32), torch.nn.Linear(32, 259))

    def forward(self, batch):
        return self.layers(batch["tokens"])

    def loss(self, outputs, batch):
        return torch.nn.functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())

    def eval_forward(self, batch, outputs=None):
        return self(batch) if outputs is None else outputs

    def update_metric(self, batch, outputs, metric):
        pass


def make_model() -> tuple:
    model = Model()
    return model, torch.optim.AdamW(model.parameters())


def newest() -> str | None:
    """The last checkpoint that was written to its end."""
    whole = filter(is_zipfile, run.glob("ba*.pt"))
    found = max(whole, key=lambda path: int(path.stem[2:]), default=None)
    return found and str(found)


def main() -> None:
    dist.initialize_dist(get_device(device))  # before loaders are made: they ask for their rank
    model, optimizer = make_model()
    data = SavableData(make_loader(), batch_size=4)
    trainer = Trainer(
        model=model,
        optimizers=optimizer,
        train_dataloader=data.spec,
        callbacks=[data],
        eval_dataloader=eval_data(make_evaluation(), batch_size=4),
        load_path=newest(),
        **settings,
    )
    trainer.fit()
    trainer.close()


if __name__ == "__main__":
    main()
