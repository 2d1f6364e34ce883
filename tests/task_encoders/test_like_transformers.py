"""Videos and sounds in text are those of the processors of `transformers`: Qwen2.5-VL's, Qwen2.5-Omni's, InternVL's."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from savable_pipeline.core.rng import Rng
from task_encoders.chat import ChatEncoder
from task_encoders.parts.audio_tokens import AudioTokens
from task_encoders.parts.chat_template import OwnTemplate
from task_encoders.parts.image_tiles import NativeSize, Tiles
from task_encoders.parts.medium import MRope
from task_encoders.parts.video_tokens import VideoFrames, VideoTokens
from task_encoders.parts.vision import Vision
from tests.support.media_files import audio_bytes, video_bytes
from tests.support.toy_chats import chats, save_small_qwen
from tests.support.toy_media import plain_video
from tests.support.toy_samples import item, png, sample, trained_tokenizer
from tests.support.toy_tokenizers import tokenizer as family_tokenizer

pytestmark = pytest.mark.landing  # the processors of transformers take eight seconds to import

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
QWEN = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "audio_token": "<|AUDIO|>"}
OMNI = {f"{kind}_{end}_token": f"<|{kind}_{end}|>" for kind in ("vision", "audio") for end in ("bos", "eos")}
INTERN = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
SMALL = {"shortest_edge": 28 * 28 * 16, "longest_edge": 28 * 28 * 48}
BEFORE, AFTER = "<|vision_bos|>", "<|vision_eos|>"


@cache
def tokenizer() -> Any:
    """Return a tokenizer with the special tokens of all three models."""
    from transformers import PreTrainedTokenizerFast

    trained = trained_tokenizer()
    named = {**QWEN, **OMNI, **INTERN}
    trained.add_special_tokens(sorted({*named.values(), "<video>"}))
    return PreTrainedTokenizerFast(
        tokenizer_object=trained, pad_token="<|endoftext|>", extra_special_tokens={**named, "video_token": "<video>"}
    )


def token_id(text: str) -> int:
    """Return the id of a special token."""
    return int(tokenizer().convert_tokens_to_ids(text))


def qwen_parts() -> dict[str, Any]:
    """Return Qwen's image and video processors for small sizes, and the tokenizer."""
    from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    own = tokenizer()
    own.video_token, own.video_token_id = "<|video_pad|>", token_id("<|video_pad|>")
    videos = Qwen2VLVideoProcessor(size=SMALL, do_sample_frames=True, fps=2.0, cap_pixels_per_frame=True)
    return {"image_processor": Qwen2VLImageProcessor(size=SMALL), "video_processor": videos, "tokenizer": own}


def qwen(rope: MRope) -> ChatEncoder:
    """Return an encoder with the same settings."""
    marks: dict[str, Any] = {"before": BEFORE, "after": AFTER, "mean": MEAN, "std": STD}
    low, high = SMALL.values()
    vision = Vision(NativeSize(14, 2, low, high), token_id("<|image_pad|>"), **marks)
    video = VideoTokens(token_id("<|video_pad|>"), min_pixels=low, max_pixels=high, **marks)
    audio = AudioTokens(token_id("<|AUDIO|>"), before="<|audio_bos|>", after="<|audio_eos|>")
    own = tokenizer()
    own.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return ChatEncoder(own, vision=vision, video=video, audio=audio, rope=rope)


def noise_video(seconds: float, fps: int, size: tuple[int, int]) -> bytes:
    """Return a video of noise."""
    return video_bytes(round(seconds * fps), fps=fps, size=size, noise=60)


def sample_asking(text: str, **parts: Any) -> Any:
    """Return a sample with this question, an answer, and parts named `0_mp4` for 0.mp4."""
    turns = [{"from": "human", "value": text}, {"from": "gpt", "value": "yes"}]
    return sample({"json": {"conversations": turns}, **{name.replace("_", "."): part for name, part in parts.items()}})


def decoded_frames(given: Any, part: str) -> tuple[Any, Any]:
    """Return all frames of a part, uint8 (n, 3, height, width), and the facts that a processor needs."""
    from transformers.video_utils import VideoMetadata

    with given.video(part) as video:
        total = round(video.duration_s * video.fps)
        return torch.from_numpy(video.frames_by_index(range(total))), VideoMetadata(
            total_num_frames=total, fps=video.fps
        )


@pytest.mark.parametrize("rate", [0.5, 1, 2, 4])
def test_frames_equal_those_the_processors_sample(rate: float) -> None:
    from transformers import InternVLVideoProcessor, Qwen2VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    theirs, interns, compared = Qwen2VLVideoProcessor(), InternVLVideoProcessor(), 0
    tokens = VideoTokens(300, fps=rate, patch=1, merge=1, min_pixels=1, max_pixels=2)
    for total in range(2, 180):
        for fps in (12, 23.976, 24, 30, 60):
            video = plain_video(1, fps, (1, 1))
            video.duration_s = total / fps
            wanted = theirs.sample_frames(VideoMetadata(total_num_frames=total, fps=fps), fps=rate).tolist()
            taken = [int((time + 0.0005) * fps) for time in tokens.times(video, multiple=2)]
            if len(wanted) % 2 == 0:  # else theirs sums up rounded steps and takes one more than it asks for
                assert taken == wanted
                compared += 1
            count = min(total, 8)
            wanted = interns.sample_frames(VideoMetadata(total_num_frames=total, fps=fps), num_frames=count).tolist()
            times = VideoFrames(min_frames=count, max_frames=count).times(video, at="middle")
            assert [int((time + 0.0005) * fps) for time in times] == wanted
    assert compared > 880  # of 890


def test_qwen_gets_equal_tokens_grids_times_positions_and_close_pixels() -> None:
    from transformers import Qwen2_5_VLProcessor

    text = "What is <image> and <video>, if not <video>?"
    photo = np.random.default_rng(0).integers(0, 256, (90, 130, 3), np.uint8)
    given = sample_asking(
        text, **{"png": png(photo), "0_mp4": noise_video(3, 12, (160, 96)), "1_mp4": noise_video(1.25, 8, (64, 120))}
    )
    made = item(qwen(MRope(2)), given)
    processor = Qwen2_5_VLProcessor(**qwen_parts())
    videos, metadata = zip(decoded_frames(given, "0.mp4"), decoded_frames(given, "1.mp4"), strict=True)
    rendered = text.replace("<image>", f"{BEFORE}<|image_pad|>{AFTER}").replace(
        "<video>", f"{BEFORE}<|video_pad|>{AFTER}"
    )
    theirs = processor(
        text=[rendered + "yes"], images=[photo], videos=list(videos), video_metadata=list(metadata), return_tensors="pt"
    )
    assert made["tokens"].tolist() == theirs["input_ids"][0].tolist()
    assert made["video_grids"].tolist() == theirs["video_grid_thw"].tolist()
    assert made["video_seconds"].tolist() == pytest.approx(theirs["second_per_grid_ts"].tolist(), rel=1e-7)
    assert [[1, *grid] for grid in made["grids"].tolist()] == theirs["image_grid_thw"].tolist()
    patches = made["video_patches"].float().flatten(2)  # in grey levels, (P, 3, 2 * 14 * 14)
    grey = theirs["pixel_values_videos"].view(patches.shape) * torch.tensor(STD)[:, None] + torch.tensor(MEAN)[:, None]
    off = (patches - 255 * grey).abs()
    assert off.max() < 9 and off.mean() < 1  # FFmpeg's bicubic filter is another than torchvision's
    assert torch.equal(made["mrope_ids"].T[:, None], _qwen_positions(theirs))


def _qwen_positions(inputs: Any) -> torch.Tensor:
    """Return the model's positions, int64 (3, 1, T)."""
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    class Bare(Qwen2_5_VLModel):
        def __init__(self, config: Any) -> None:
            torch.nn.Module.__init__(self)
            self.config = config

    model = Bare(Qwen2_5_VLConfig(vision_config={"tokens_per_second": 2}))
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    positions: torch.Tensor = model.get_rope_index(**{name: inputs[name] for name in names})[0]
    return positions


def test_omni_gets_equal_audio_tokens_features_and_positions() -> None:
    from transformers import Qwen2_5OmniProcessor, WhisperFeatureExtractor

    parts = {"0_flac": audio_bytes(1.5071), "1_flac": audio_bytes(0.73), "mp4": noise_video(6, 6, (90, 60))}
    given = sample_asking("<audio>a<video>b<audio>", **parts)
    made = item(qwen(MRope(25)), given)
    hearing = WhisperFeatureExtractor(feature_size=128, chunk_length=300, return_attention_mask=True)
    processor = Qwen2_5OmniProcessor(feature_extractor=hearing, **qwen_parts())
    sounds = [given.audio(part).samples(rate=16000, mono=True)[0] for part in ("0.flac", "1.flac")]
    video, metadata = decoded_frames(given, "mp4")
    sound = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    theirs = processor(
        text=[f"{sound}a{BEFORE}<|video_pad|>{AFTER}b{sound}yes"],
        audio=sounds,
        videos=[video],
        video_metadata=[metadata],
        videos_kwargs={"size": SMALL},
        return_tensors="pt",
    )
    assert made["tokens"].tolist() == theirs["input_ids"][0].tolist()
    mask = theirs["feature_attention_mask"].bool()
    assert made["audio_frames"].tolist() == mask.sum(1).tolist()
    features = theirs["input_features"].transpose(1, 2)[mask]
    assert (made["audio_mels"] - features).abs().max() < 2e-4
    assert torch.equal(made["mrope_ids"].T[:, None], _omni_positions(theirs, mask.sum(1)))


def _omni_positions(inputs: Any, audio_frames: torch.Tensor) -> torch.Tensor:
    """Return the positions of the model's thinker, int64 (3, 1, T)."""
    from transformers import Qwen2_5OmniThinkerConfig
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
        Qwen2_5OmniThinkerForConditionalGeneration as Thinker,
    )

    class Bare(Thinker):
        def __init__(self, config: Any) -> None:
            torch.nn.Module.__init__(self)
            self.config, self.spatial_merge_size = config, 2

    ids = {
        f"{kind}_token_id": token_id(text) for kind, text in (("image", "<|image_pad|>"), ("video", "<|video_pad|>"))
    }
    ids |= {"audio_token_id": token_id("<|AUDIO|>"), "audio_start_token_id": token_id("<|audio_bos|>")}
    config = Qwen2_5OmniThinkerConfig(**ids, vision_start_token_id=token_id(BEFORE), position_id_per_seconds=25)
    config.vision_start_token_id, config.audio_start_token_id = token_id(BEFORE), token_id("<|audio_bos|>")
    seconds = torch.tensor([float(inputs["video_second_per_grid"][0])])
    positions: torch.Tensor = Bare(config).get_rope_index(
        inputs["input_ids"],
        video_grid_thw=inputs["video_grid_thw"],
        audio_seqlens=audio_frames,
        second_per_grids=seconds,
        attention_mask=inputs["attention_mask"],
    )[0]
    return positions.long()


def test_internvl_gets_equal_tokens_and_close_pixels() -> None:
    from transformers import GotOcr2ImageProcessor, InternVLProcessor, InternVLVideoProcessor

    vision = Vision(Tiles(), token_id("<IMG_CONTEXT>"), before="<img>", after="</img>", mean=MEAN, std=STD)
    own = tokenizer()
    own.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    own.video_token, own.video_token_id = "<video>", token_id("<video>")
    given = sample_asking("<video>\nWhat?", mp4=noise_video(2, 12, (160, 96)))
    encoder = ChatEncoder(own, vision=vision, video=VideoFrames(min_frames=3, max_frames=3))
    made = item(encoder, given)
    videos = InternVLVideoProcessor(size={"height": 448, "width": 448}, do_sample_frames=True, num_frames=3)
    processor = InternVLProcessor(image_processor=GotOcr2ImageProcessor(), tokenizer=own, video_processor=videos)
    video, metadata = decoded_frames(given, "mp4")
    theirs = processor(text=["<video>\nWhat?yes"], videos=[video], video_metadata=[metadata], return_tensors="pt")
    assert made["tokens"].tolist() == theirs["input_ids"][0].tolist()
    patches = encoder.batch([made], Rng(7))["patches"]
    tiles = patches.view(3, 32, 32, 3, 14, 14).permute(0, 3, 1, 4, 2, 5).reshape(3, 3, 448, 448)
    off = (tiles - theirs["pixel_values"]).abs().max()
    assert off * min(STD) * 255 < 3


def test_qwen_computes_the_same_on_a_pack_as_on_single_conversations() -> None:
    photo = np.random.default_rng(0).integers(0, 256, (90, 130, 3), np.uint8)
    encoder = qwen(MRope(2))
    samples = [sample_asking("a <image> b <video>?", png=png(photo), mp4=noise_video(3, 12, (160, 96)))]
    samples.append(sample_asking("q <video>", mp4=noise_video(2, 12, (96, 96))))
    items = [item(encoder, given) for given in samples]
    model = _small_qwen()
    packed = _logits(model, encoder.batch([encoder.pack(items, Rng(7))], Rng(7)), own_positions=False)
    alone = [_logits(model, encoder.batch([each], Rng(7)), own_positions=True) for each in items]
    assert (packed - torch.cat(alone)).abs().max() < 1e-12 < packed.std()


def _small_qwen() -> Any:
    """Return the model with two layers of random weights, float64."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    size: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    text = {**size, **heads, "vocab_size": len(tokenizer()), "rope_parameters": rope}
    sight = {**size, "depth": 2, "out_hidden_size": 32, "num_heads": 2, "tokens_per_second": 2}
    sight |= {"window_size": 112, "fullatt_block_indexes": [1]}
    ids = {f"{kind}_token_id": token_id(f"<|{kind}_pad|>") for kind in ("image", "video")}
    torch.manual_seed(0)
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=sight, **ids)).double()


@torch.no_grad()
def _logits(model: Any, batch: dict[str, Any], *, own_positions: bool) -> torch.Tensor:
    """Return the model's logits of a batch of one row, with positions of the model or of the batch."""
    inputs: dict[str, Any] = {"input_ids": batch["tokens"], "video_grid_thw": batch["video_grids"]}
    inputs |= {"pixel_values_videos": batch["video_patches"].flatten(1).double()}
    if len(batch["grids"]):
        inputs["image_grid_thw"] = torch.nn.functional.pad(batch["grids"], (1, 0), value=1)
        inputs["pixel_values"] = _by_tokens(batch["patches"], batch["grids"]).double()
    if own_positions:
        kinds = [(batch["tokens"] == token_id(f"<|{kind}_pad|>")).int() for kind in ("image", "video")]
        inputs |= {"mm_token_type_ids": kinds[0] + 2 * kinds[1], "second_per_grid_ts": batch["video_seconds"]}
    else:
        both = torch.cat([batch["position_ids"][..., None], batch["mrope_ids"]], -1)
        inputs["position_ids"] = both.permute(2, 0, 1)
    logits: torch.Tensor = model(**inputs, use_cache=False).logits[0]
    return logits


def _by_tokens(patches: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
    """Reorder patches from row by row to token by token, each twice, as the model takes them."""
    made = []
    for own, (rows, columns) in zip(patches.split(grids.prod(1).tolist()), grids.tolist(), strict=True):
        blocks = own.view(rows // 2, 2, columns // 2, 2, 3, 1, 14, 14).transpose(1, 2)
        made.append(blocks.expand(-1, -1, -1, -1, -1, 2, -1, -1).reshape(rows * columns, -1))
    return torch.cat(made)


def tokens_and_mask(made: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return the tokens of an item, and which of them have loss, as `assistant_masks` does."""
    learned = [-100, *made["labels"].tolist()[:-1]]
    return made["tokens"].tolist(), [int(label != -100) for label in learned]


def test_chats_equal_tokens_and_loss_mask_of_qwens_processor(tmp_path: Path) -> None:
    from transformers import AutoProcessor

    save_small_qwen(tmp_path)
    processor = AutoProcessor.from_pretrained(tmp_path)
    own = processor.tokenizer
    sizes = processor.image_processor.size
    tiles = NativeSize(14, 2, sizes["shortest_edge"], sizes["longest_edge"])
    pad = own.convert_tokens_to_ids("<|image_pad|>")
    encoder = ChatEncoder(
        own, vision=Vision(tiles, pad, text="<|image_pad|>"), template=OwnTemplate(processor, content="parts")
    )
    for turns, images in chats():
        parts = {f"{number}.png": png(np.asarray(image)) for number, image in enumerate(images)}
        made = item(encoder, sample({"json": {"messages": turns}, **parts}))
        waiting = iter(images)
        filled = [
            {**turn, "content": [{**p, "image": next(waiting)} if p["type"] == "image" else p for p in turn["content"]]}
            for turn in turns
        ]
        both = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True, "return_tensors": "pt"}
        theirs = processor.apply_chat_template(filled, **both)
        assert tokens_and_mask(made) == (theirs["input_ids"][0].tolist(), theirs["assistant_masks"][0].tolist())


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma", "llama3"])
def test_chats_equal_tokens_of_llavas_processor(family: str) -> None:
    from transformers import CLIPImageProcessor, LlavaProcessor

    own = family_tokenizer(family)
    own.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }}{% else %} ASSISTANT: {{ m.content }}"
        "</s>{% endif %}{% endfor %}{% if add_generation_prompt %} ASSISTANT:{% endif %}"
    )
    eyes = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    processor = LlavaProcessor(eyes, own, 14, "default", num_additional_image_tokens=1)
    tiles = Tiles(14, 1, 28, max_tiles=1, thumbnail=False)
    encoder = ChatEncoder(own, vision=Vision(tiles, own.convert_tokens_to_ids("<image>")))
    photo = np.random.default_rng(0).integers(0, 256, (90, 130, 3), np.uint8)
    for question in ("<image>\nWhat is it?", "What is it?\n<image>", "Look, <image> is it four?"):
        made = item(encoder, sample_asking(question, png=png(photo)))
        theirs = processor(text=f"USER: {question} ASSISTANT: yes</s>", images=[photo], add_special_tokens=False)
        assert made["tokens"].tolist() == theirs["input_ids"][0]
