"""Encoders of public code bases run unchanged: each sample as in Energon, each run resumed exactly."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

energon = pytest.importorskip("megatron.energon", reason="needs megatron-energon: pip install -e '.[energon]'")

from savable_pipeline import energon as ours  # noqa: E402
from tests.energon.chains import LANES, by_slots, check_chain  # noqa: E402
from tests.energon.prepared import CRUDE, by_both, png, prepared_by_energon, text_of, write  # noqa: E402
from tests.energon.public import bridge_diffusion, energon_tests, megatron_lm, rebuilt  # noqa: E402

TYPED = "sample_type: {__module__: megatron.energon, __class__: %s}\nfield_map: {%s}\n"
TYPED += "subflavors: {augmentation: true, is_llava_training: true}\n"
PIL = {"image_decode": "pil"}
PACKED_OFFLINE = (
    "sample_type: {__module__: tests.energon.public.rebuilt, __class__: PackedCaptions}\n"
    "sample_loader: loader.py:load\npart_filter: [png, 2.png, json]\n"
)


def torch_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def latents(i: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(i)
    video = torch.randn(2, 1 + i % 2, 4, 4, generator=generator)
    video[0, 0, 0, 0] = float("nan") if i % 9 == 8 else 0.5
    context = torch.randn(3, 4, generator=generator)
    return {"pth": torch_bytes(video), "pickle": pickle.dumps(context), "json": {"fps": i}}


def answers(i: int) -> dict[str, Any]:
    return {"png": png(i), "json": {"q": text_of(i), "a": text_of(i + 1)}}


def offline(i: int) -> dict[str, Any]:
    return {"png": png(i), "2.png": png(i + 50), "json": {"captions": [text_of(i)[:14], text_of(i + 1)[:14]]}}


def captions(i: int) -> dict[str, Any]:
    return {"png": png(i), "txt": text_of(i)}


def aux(folder: Path) -> Path:
    """The dataset of Energon's tests: a second one by key, and files, beside the first."""
    for name, count in (("ds1", 60), ("ds2", 155)):
        root = write(folder / name, count, lambda i: {"txt": str(i % 55)}, CRUDE, shard=50, key="{:06d}")
        prepared_by_energon(root)
    path = folder / "aux_metadataset.yaml"
    path.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits: {train: {path: ds1, subflavors: {crude_type: "
        "aux_random_access}, aux: {pkl_source: ds2, fs_source: 'filesystem://.'}}}\n"
    )
    return path


def cooked(folder: Path, kind: str) -> Path:
    parts = lambda i: {"txt": str(i), "pkl": pickle.dumps({"idx": i})}  # noqa: E731
    return write(folder / "data", 30, parts, CRUDE.replace("{kind: plain}", f"{{crude_type: {kind}}}"))


def typed(parts: Any, kind: str, fields: str) -> Any:
    return lambda folder: write(folder / "data", 33, parts, TYPED % (kind, fields))


def packed_offline(folder: Path) -> Path:
    root = write(folder / "data", 20, offline, PACKED_OFFLINE)
    code = "def load(sample):\n    return {'images': [sample['png'], sample['2.png']], **sample['json']}\n"
    (root / ".nv-meta/loader.py").write_text(code)
    return root


def with_prompts(packing: int | None) -> Any:
    def make() -> Any:
        megatron_lm.ARGS.packing_buffer_size = packing
        return megatron_lm.TaskEncoder()

    return make


VQA = "image: png, context: 'json[q]', answers: 'json[a]'"
CAPTIONS = typed(captions, "CaptioningSample", "image: png, caption: txt")
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "energon, cooked": (partial(cooked, kind="txtpkl"), energon_tests.CookingTaskEncoder, {"trust": True}),
    "energon, unpickled": (
        partial(cooked, kind="otherpkl"),
        energon_tests.CookingTaskEncoder,
        {"trust": True, "packing_buffer_size": 3},
    ),
    "energon, any": (partial(cooked, kind="x"), energon_tests.GenericCookingTaskEncoder, {"trust": True}),
    "energon, aux": (aux, energon_tests.CookingTaskEncoder, {}),
    "energon, files": (aux, energon_tests.CookingTaskEncoderWithAuxFilesystemReference, {}),
    "energon, lazy": (aux, energon_tests.LazyCookingTaskEncoder, {"packing_buffer_size": 3}),
    "energon, late": (aux, energon_tests.LazyCookingTaskEncoderWithPostencode, {"packing_buffer_size": 3}),
    "energon, packs": (CAPTIONS, energon_tests.PackingTaskEncoder, {"packing_buffer_size": 11}),
    "energon, random": (typed(captions, "TextSample", "text: txt"), energon_tests.RandomTextTaskEncoder, {}),
    "energon, encoding": (CAPTIONS, energon_tests.EncodingTaskEncoder, {}),
    "megatron-lm, captions": (CAPTIONS, with_prompts(None), PIL),
    "megatron-lm, packed": (typed(answers, "VQASample", VQA), with_prompts(6), {**PIL, "packing_buffer_size": 6}),
    "bridge, wan": (
        lambda folder: write(folder / "data", 30, latents),
        partial(bridge_diffusion.WanTaskEncoder, seq_length=24, packing_buffer_size=8),
        {"packing_buffer_size": 8, "trust": True},
    ),
    "bridge, qwen-vl": (
        lambda folder: write(folder / "data", 30, lambda i: {"png": png(i), "json": {"id": i, "text": text_of(i)}}),
        rebuilt.QwenVL,
        {"packing_buffer_size": 6},
    ),
    "llava, captions": (CAPTIONS, rebuilt.LlavaOneVision, PIL),
    "llava, offline packs": (packed_offline, rebuilt.LlavaOneVision, {**PIL, "trust": True}),
}
IN_ORDER = {"shuffle_over_epochs_multiplier": None, "parallel_shard_iters": 1}  # packs depend on the order


@pytest.fixture(autouse=True)
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps({"CaptioningPretraining": {"raw": ["Say it.", "What is it?", "Describe."]}}))
    monkeypatch.setattr(megatron_lm.ARGS, "prompt_path", str(path))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[Path], Path]], Path]:
    """Write the data of a case once."""
    return cache(lambda write_data: write_data(tmp_path_factory.mktemp("data")))


@pytest.mark.parametrize("case", CASES)
def test_each_sample_equals_energons(case: str, written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write_data, make, settings = CASES[case]
    theirs, mine = by_both(written(write_data), make, monkeypatch, **settings, **IN_ORDER)
    assert mine == theirs
    assert len(mine) >= 3


def check_resumes(path: Path, case: str, slots: int) -> None:
    _, make, settings = CASES[case]

    def dataset(config: Any) -> Any:
        more: dict[str, Any] = {"batch_size": 1, "shuffle_buffer_size": 5, "max_samples_per_sequence": 2, **settings}
        return ours.get_train_dataset(path, task_encoder=make(), worker_config=config, lanes=LANES, seed=3, **more)

    resumes, _ = check_chain(dataset, by_slots(dataset, slots), 1)
    assert resumes >= 1


@pytest.mark.parametrize("case", CASES)
def test_runs_are_resumed_exactly(case: str, written: Any) -> None:
    check_resumes(written(CASES[case][0]), case, 12)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_longer_runs_are_resumed_exactly(case: str, written: Any) -> None:
    check_resumes(written(CASES[case][0]), case, 24)
