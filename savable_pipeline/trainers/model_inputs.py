"""`model_inputs`: a batch of tokens as arguments of a `transformers` model.

A label of a batch is the next token. The loss of such a model compares each position with the label after it:

    batch           tokens     a b c d     labels  b c d -
    model_inputs    input_ids  a b c d     labels  - b c d

A model of `transformers` finds the documents of a pack by `position_ids` that restart at 0. This needs no mask, no KV
cache (pass `use_cache=False`, also in training) and, with flash attention, one row:

    position_ids    0 1 2 3 0 1 0 1 2      three documents
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

_IGNORED_LABEL = -100
_ADVICE = "Return model_inputs(super().batch(items, rng), config) from `batch` of the encoder"
# types of layers that apply their mask
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# attention functions that get a mask, unlike flash attention, which gets `cu_seqlens`
_MASKED_ATTENTION = {"eager", "sdpa", "flex_attention"}
_MEDIA_FIELDS = ("patches", "video_patches", "audio_mels", "image", "video", "features")  # media of a batch


def model_inputs(batch: Mapping[str, Any], model_or_config: Any) -> dict[str, Any]:
    """Return the arguments of a causal or vision-language model of `transformers`.

    Labels are at their own tokens, because the model's loss shifts them. Prompts, padding and padding rows (`valid`) do
    not contribute to the loss. Nor does the label of a row's last token, which only a document cut at `max_length` has.
    Documents of a pack do not attend to each other. Fields that no model takes (`receipts`, counts, your own) are
    dropped.

    Qwen2-VL and Qwen2.5-VL take images in text (`Vision`) and videos (`VideoTokens`), and need the encoder's
    `rope=MRope(…)`. LLaVA, InternVL and SmolVLM take images as tiles of one size. GIT takes the images of
    `CaptioningEncoder`, if not packed.

    Args:
        batch: A batch of an encoder of `task_encoders`, with `tokens` and `labels`, and with `lengths` or, of packs,
            `cu_seqlens` and `position_ids`. Of `split` and `micro_batches` too; not of `cut_context`.
        model_or_config: The model, wrapped or not, or its configuration. If you pass a configuration, its
            `attn_implementation` must be that of the model.

    Returns:
        `input_ids` and `labels`, int64 (B, T), and further arguments that the model needs. With flash attention, packs
        are one row of B · T tokens.

    Raises:
        TypeError: `model_or_config` is neither a model of `transformers` nor a configuration.
        ValueError: The model would attend across documents of a pack, does not take a medium of the batch, or is not a
            decoder-only model, or the batch is not one of those above. The message says which.

    Example:
        ```python
        import torch
        from transformers import LlamaConfig
        from savable_pipeline.trainers.model_inputs import model_inputs
        batch = {"tokens": torch.tensor([[5, 6]]), "labels": torch.tensor([[6, -100]]), "lengths": torch.tensor([2])}
        model_inputs(batch, LlamaConfig())["labels"].tolist()   # [[-100, 6]]
        ```
    """
    config = _config_of(model_or_config)
    if not {"tokens", "labels"} <= {*batch} or {"lengths", "cu_seqlens"}.isdisjoint(batch):
        raise ValueError(
            "model_inputs needs tokens, labels, and lengths or cu_seqlens, as encoders of task_encoders return. "
            f"This batch has {', '.join(sorted(batch))}."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{config.model_type} has an encoder, but model_inputs needs a decoder-only model")
    media = _media_inputs(batch, config)
    labels = batch["labels"]
    if "valid" in batch:
        labels = labels.masked_fill(~batch["valid"][:, None], _IGNORED_LABEL)
    if "cu_seqlens" in batch:
        return {**_pack_inputs(batch, labels, config), **media}
    length = batch["tokens"].shape[1]
    mask = torch.arange(length, device=labels.device) < batch["lengths"][:, None]
    inputs = {"input_ids": batch["tokens"], "labels": _unshifted(labels), "attention_mask": mask.long()}
    if config.model_type in _MROPE_MODELS:
        inputs["position_ids"] = _positions(batch, config)
    return {**inputs, **media}


def has_packs(inputs: Any) -> bool:
    """Return whether a row has several documents that only `position_ids` separate.

    Args:
        inputs: Arguments of a model.
    """
    if not isinstance(inputs, Mapping) or "position_ids" not in inputs or "attention_mask" in inputs:
        return False
    positions = inputs["position_ids"]
    return bool((positions[..., 1:] == 0).any())


def check_inputs(inputs: Any, model: Any) -> None:
    """Raise ValueError if a `transformers` model would silently misread a batch.

    Args:
        inputs: A batch, as a trainer passes it to the model.
        model: The model. Models of other libraries are not checked.

    Raises:
        ValueError: The arguments are not from `model_inputs`, or are for another attention.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # a model of PEFT
    if not isinstance(inputs, Mapping) or not type(inner).__module__.startswith("transformers.models."):
        return
    if raw := {"tokens", "cu_seqlens"} & {*inputs}:
        found = " and ".join(sorted(raw))
        raise ValueError(f"a batch has {found}, which {type(inner).__name__} does not take. {_ADVICE}.")
    if _are_shifted(inputs):
        raise ValueError(f"labels are shifted already, but the model shifts them again. {_ADVICE}.")
    if "flash" in (_attention_name(inner.config) or "") and has_packs(inputs) and len(inputs["input_ids"]) > 1:
        raise ValueError(
            f"the attention of the model is {_attention_name(inner.config)}, which misreads packs in several rows. "
            "Pass the configuration of the model, with this attn_implementation, to model_inputs."
        )


def _are_shifted(inputs: Mapping[str, Any]) -> bool:
    """Return whether most labels are the token after their own in `input_ids`."""
    tokens, labels = inputs.get("input_ids"), inputs.get("labels")
    if tokens is None or labels is None or tokens.shape != labels.shape:
        return False
    is_target = labels != _IGNORED_LABEL
    is_next_token = (labels[:, :-1] == tokens[:, 1:]) & is_target[:, :-1]
    return bool(2 * is_next_token.sum() > is_target.sum() and (labels != tokens)[is_target].any())


def _pack_inputs(batch: Mapping[str, Any], labels: torch.Tensor, config: Any) -> dict[str, Any]:
    """Return the arguments for a batch of packs. Raises ValueError if its documents would mix."""
    borders, positions = batch["cu_seqlens"], batch["position_ids"]
    if positions.flatten()[borders[:-1].long()].any():
        raise ValueError("position_ids must be 0 at cu_seqlens. Pass whole batches, not parts of cut_context.")
    if reason := _mixing_reason(config):
        raise ValueError(f"{config.model_type}: {reason}, so documents of a pack would mix. Remove the packer.")
    inputs = {"input_ids": batch["tokens"], "labels": labels, "position_ids": _positions(batch, config)}
    if flash := "flash" in (_attention_name(config) or ""):
        inputs = {name: value.flatten(-2).unsqueeze(-2) for name, value in inputs.items()}
    inputs |= {"labels": _unshifted(inputs["labels"]), "use_cache": False}
    if flash and config.get_text_config() is config:  # otherwise the vision tower would get them too
        inputs |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), borders)
        inputs |= dict.fromkeys(("max_length_q", "max_length_k"), int(batch["max_seqlen"]))
    return inputs


def _unshifted(labels: torch.Tensor) -> torch.Tensor:
    """Shift labels, which are one token ahead, to their own tokens."""
    return torch.nn.functional.pad(labels[:, :-1], (1, 0), value=_IGNORED_LABEL)


def _positions(batch: Mapping[str, Any], config: Any) -> torch.Tensor:
    """Return positions, int64 (B, T), or (4, B, T) for models with M-RoPE.

    They are positions in the document. M-RoPE also has those in time, height and width.
    """
    positions: torch.Tensor = batch["position_ids"]
    if config.model_type not in _MROPE_MODELS:
        return positions
    mrope = batch.get("mrope_ids", positions[..., None].expand(-1, -1, 3))
    return torch.cat([positions[None], mrope.movedim(-1, 0)])


def _config_of(model: Any) -> Any:
    """Return the configuration of a model, which may be wrapped several times, or a configuration as it is."""
    inner = model
    while inner is not None:
        for candidate in (inner, getattr(inner, "config", None)):
            if hasattr(candidate, "get_text_config"):
                return candidate
        inner = getattr(inner, "module", None)
    raise TypeError(
        f"model_inputs takes a transformers model or configuration, not {type(model).__name__}. For your own model, "
        "use the batch as it is."
    )


def _attention_name(config: Any) -> str | None:
    name: str | None = getattr(config.get_text_config(), "_attn_implementation", None)
    return name


def _mixing_reason(config: Any) -> str | None:
    """Return why documents of a pack attend to each other in this model, or None."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    text, attention = config.get_text_config(), _attention_name(config) or "sdpa"
    decoder = MODEL_MAPPING.get(type(text), None)
    if decoder is None or (text is not config and config.model_type not in _MEDIA_CONVERTERS):
        return "how it attends is not known here"
    stateful = set(getattr(text, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if getattr(decoder, "_is_stateful", False) or stateful:
        return f"it has layers that carry a state over tokens ({', '.join(sorted(stateful)) or decoder.__name__})"
    has_borders = "flash" in attention and getattr(decoder, "_supports_attention_backend", False)
    if attention not in _MASKED_ATTENTION and not has_borders:
        return f"its attention {attention!r} does not learn where documents begin"
    if _mask_arguments(decoder) != {"text_position_ids" if config.model_type in _MROPE_MODELS else "position_ids"}:
        return "its masks ignore position_ids"
    return None


@cache
def _mask_arguments(decoder: type) -> set[str]:
    """Return the expressions that a model passes as `position_ids` to the functions for its masks.

    This reads the model's source, because nothing else shows it. Models that use `position_ids` only for embeddings
    have the same signature.
    """
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[decoder.__module__]))):
        if isinstance(node, ast.Call) and "mask" in ast.unparse(node.func):  # create_causal_mask(position_ids=…)
            found |= {ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "position_ids"}
        if isinstance(node, ast.Dict):  # mask_kwargs = {"config": …, "position_ids": …}
            named = {ast.unparse(key): value for key, value in zip(node.keys, node.values, strict=True) if key}
            found |= {ast.unparse(named[key]) for key in named if key == "'position_ids'" and "'config'" in named}
    return found


def _media_inputs(batch: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return the arguments for the media of a batch. Raises ValueError if the model does not take one."""
    inputs: dict[str, Any] = {}
    for field in _MEDIA_FIELDS:
        if not len(batch.get(field, ())):
            continue
        convert = _MEDIA_CONVERTERS.get(config.model_type, {}).get(field)
        if convert is None or (field == "image" and "cu_seqlens" in batch):
            packed = " in packs" if convert else ""
            advice = "Remove the packer" if convert else _advice_for(field)
            raise ValueError(f"a batch has {field!r}{packed}, which {config.model_type} does not take. {advice}.")
        if config.model_type in _MROPE_MODELS and "mrope_ids" not in batch:
            rate = getattr(config.vision_config, "tokens_per_second", None)
            raise ValueError(
                f"{config.model_type} needs mrope_ids. Set rope=MRope(tokens_per_second={rate}) in the encoder."
            )
        inputs |= convert(batch, config)
    return inputs


def _advice_for(field: str) -> str:
    """Return advice, for a message, about a media field that the model does not take."""
    models = ", ".join(name for name, fields in _MEDIA_CONVERTERS.items() if field in fields)
    if field == "image":
        return f"Use ChatEncoder or InterleavedEncoder with vision=Vision(...), or one of these models: {models}"
    return f"Use one of these models: {models}" if models else "Remove it from the batch"


def _patch_inputs(batch: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return patches in the order of Qwen2-VL, where those merged into a token are adjacent, repeated along time."""
    vision, grids = config.vision_config, batch["grids"]
    merge = vision.spatial_merge_size  # a token is merge × merge patches
    order, start = [], 0
    for rows, columns in grids.tolist():
        indices = torch.arange(start, start + rows * columns).view(rows // merge, merge, columns // merge, merge)
        order.append(indices.transpose(1, 2).flatten())
        start += rows * columns
    patches = batch["patches"][torch.cat(order).to(grids.device)]
    over_time = patches[:, :, None].expand(-1, -1, vision.temporal_patch_size, -1, -1)
    time_steps = torch.ones_like(grids[:, :1])
    return {"pixel_values": _flatten_patches(over_time, vision), "image_grid_thw": torch.cat([time_steps, grids], 1)}


def _video_inputs(batch: Mapping[str, Any], config: Any) -> dict[str, Any]:
    videos = _flatten_patches(batch["video_patches"], config.vision_config)
    return {"pixel_values_videos": videos, "video_grid_thw": batch["video_grids"]}


def _flatten_patches(patches: torch.Tensor, vision: Any) -> torch.Tensor:
    """Flatten each patch. Raises ValueError unless patches have the shape that the model needs."""
    expected = (3, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    if patches.shape[1:] != expected:
        raise ValueError(
            f"patches have {tuple(patches.shape[1:])} (channels, frames, pixels), but the model needs {expected}"
        )
    return patches.flatten(1)


def _tile_inputs(batch: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return tiles joined from their patches, float32 (tiles, 3, height, width), as `pixel_values`."""
    patches, grids = batch["patches"], batch["grids"]
    if (grids != grids[0]).any():
        raise ValueError(
            f"{config.model_type} needs equal tiles, not {grids.unique(dim=0).tolist()}. Use Vision with "
            "Tiles(side=...) of the image size of the model."
        )
    rows, columns = grids[0].tolist()
    by_tile = patches.unflatten(0, (len(grids), rows, columns))  # (tiles, rows, columns, 3, patch height, patch width)
    channels_first = by_tile.permute(0, 3, 1, 4, 2, 5)  # (tiles, 3, rows, patch height, columns, patch width)
    return {"pixel_values": channels_first.flatten(4).flatten(2, 3)}


def _one_row_of_tiles(batch: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return all tiles as those of one row, (1, tiles, …). SmolVLM assigns them to rows by the tokens of images."""
    return {name: tiles[None] for name, tiles in _tile_inputs(batch, config).items()}


def _image_inputs(batch: Mapping[str, Any], config: Any) -> dict[str, Any]:
    return {"pixel_values": batch["image"]}


_MROPE_MODELS = {"qwen2_vl", "qwen2_5_vl"}  # models with M-RoPE: positions in time, height and width
# For each type of model and each media field that it takes: the function that converts the field to its arguments.
_MEDIA_CONVERTERS: dict[str, dict[str, Callable[[Mapping[str, Any], Any], dict[str, Any]]]] = {
    **{name: {"patches": _patch_inputs, "video_patches": _video_inputs} for name in sorted(_MROPE_MODELS)},
    **{name: {"patches": _tile_inputs} for name in ("llava", "internvl")},
    "smolvlm": {"patches": _one_row_of_tiles},
    "git": {"image": _image_inputs},
}
