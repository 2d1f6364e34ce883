"""Train on the packs of images.py in TRL's SFTTrainer."""

from pathlib import Path

from images import make_loader, name, processor, settings
from trl import SFTConfig, SFTTrainer

from savable_pipeline.trainers.hf import SavableDataMixin


class SavableSFTTrainer(SavableDataMixin, SFTTrainer): ...


def main() -> SavableSFTTrainer:
    arguments = SFTConfig("run", ignore_data_skip=True, **settings)
    data = {"processing_class": processor, "train_loader": make_loader()}
    trainer = SavableSFTTrainer(name, arguments, **data)
    trainer.train(resume_from_checkpoint=any(Path("run").glob("checkpoint-*")))
    return trainer


if __name__ == "__main__":
    main()
