"""The loss of a pack is that of its documents alone, and a model learns the next token: with models of `transformers`.

The documents alone are written out here, by hand, as the models' own documentation asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from savable_pipeline.core.rng import Rng
from savable_pipeline.trainers.context_parallel import cut_context
from savable_pipeline.trainers.micro_batches import split
from savable_pipeline.trainers.model_inputs import check_inputs, model_inputs
from task_encoders.captioning import CaptioningEncoder
from task_encoders.chat import ChatEncoder
from task_encoders.interleaved import InterleavedEncoder
from task_encoders.language_modeling import LanguageModelingEncoder
from task_encoders.parts.audio_tokens import AudioTokens
from task_encoders.parts.image_tiles import NativeSize, Tiles
from task_encoders.parts.medium import MRope
from task_encoders.parts.video_tokens import VideoTokens
from task_encoders.parts.vision import Vision
from tests.support.media_files import audio_bytes, video_bytes
from tests.support.toy_flash import use_plain_flash
from tests.support.toy_samples import item, png, sample

VOCABULARY, BOS, EOS, IMAGE, VIDEO = 320, 257, 258, 300, 301  # BYTES of the encoders, and two of media
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SMALL, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 256}
EYES = {**SMALL, "patch_size": 4, "image_size": 16}


class Document(NamedTuple):
    """Token ids, labels in place (-100 without loss), and further inputs of the model for this document alone."""

    ids: list[int]
    labels: list[int]
    more: dict[str, Any] = {}  # noqa: RUF012


def document_of(*parts: tuple[str | list[int], bool], **more: Any) -> Document:
    """Return a document of bytes and ids between BOS and EOS. Each part says whether it has loss."""
    ids, labels = [BOS], [-100]
    for part, has_loss in parts:
        piece = list(part.encode()) if isinstance(part, str) else part
        ids += piece
        labels += piece if has_loss else [-100] * len(piece)
    return Document([*ids, EOS], [*labels, EOS], more)


@torch.no_grad()
def loss_alone(model: Any, documents: Sequence[Document]) -> float:
    """Return the mean loss of a target, computed on one document after the other."""
    summed, targets = 0.0, 0
    for ids, labels, more in documents:
        wanted = sum(label != -100 for label in labels[1:])
        summed += wanted * float(model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels]), **more).loss)
        targets += wanted
    return summed / targets


@torch.no_grad()
def loss(model: Any, inputs: dict[str, Any]) -> float:
    return float(model(**inputs).loss)


def random_model(name: str, attention: str = "sdpa", **settings: Any) -> Any:
    """Return a causal model of random weights, large enough that attention matters. Its cache is on, by default."""
    import transformers

    model = getattr(transformers, f"{name}ForCausalLM")
    return with_random_weights(model, model.config_class(**{**TEXT, **settings}), attention)


def with_random_weights(model: Any, config: Any, attention: str = "sdpa") -> Any:
    """Build a model with random weights that are large enough for attention to matter."""
    torch.manual_seed(1)
    built = model._from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for weight in built.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return built


# Texts.

TEXTS = [("Translate: ", "deux chats"), ("", "a b c d e f g h i j k l"), ("x", "y"), ("Once upon a ", "time, a model")]
DOCUMENTS = [document_of((prompt, False), (text, True)) for prompt, text in TEXTS]
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 4},
    "Gemma3": {"sliding_window": 4, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "StableLm": {},
    "Qwen2Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def text_batch(packs: Sequence[Sequence[int]] | None = ((0, 1), (2, 3)), **settings: Any) -> dict[str, Any]:
    """Return `TEXTS` in these packs. None: each text is a row."""
    encoder = LanguageModelingEncoder(part="json[text]", prompt="json[prompt]", **settings)
    items = [item(encoder, sample({"json": {"prompt": prompt, "text": text}})) for prompt, text in TEXTS]
    rows = items if packs is None else [encoder.pack([items[i] for i in pack], Rng(7)) for pack in packs]
    return encoder.batch(rows, Rng(7))


@pytest.mark.parametrize(("name", "attention"), [("Llama", "eager"), *((name, "sdpa") for name in MODELS)])
def test_loss_of_a_text_pack_equals_that_of_single_documents(name: str, attention: str) -> None:
    model = random_model(name, attention, **MODELS[name])
    expected = loss_alone(model, DOCUMENTS)
    padded = (text_batch(multiple=16), text_batch(None, multiple=16))
    for batch in (text_batch(), text_batch(max_length=64), text_batch([[0, 1, 2, 3]]), text_batch(None), *padded):
        for given in (model, model.config, torch.nn.DataParallel(model)):
            assert loss(model, model_inputs(batch, given)) == pytest.approx(expected, abs=1e-5)
    packed = text_batch()
    naive = {"input_ids": packed["tokens"], "labels": model_inputs(packed, model)["labels"]}
    for more in ({"attention_mask": torch.ones_like(packed["tokens"])}, {}, {"position_ids": packed["position_ids"]}):
        assert abs(loss(model, {**naive, **more}) - expected) > 1e-3  # the last: its cache hides the positions


def test_losses_of_parts_add_up_to_the_batch_loss() -> None:
    model, batch = random_model("Llama"), text_batch(max_length=64)
    parts = [model_inputs(part, model) for part in split(batch, 2)]
    targets = [int((part["labels"] != -100).sum()) for part in parts]
    summed = sum(loss(model, part) * wanted for part, wanted in zip(parts, targets, strict=True))
    assert summed / sum(targets) == pytest.approx(loss_alone(model, DOCUMENTS), abs=1e-5)


def test_padding_rows_are_masked_and_other_fields_dropped() -> None:
    model = random_model("Llama")
    valid = torch.tensor([True, False, True, True])
    batch = {**text_batch(None), "valid": valid, "receipts": torch.ones(4), "url": "x"}
    inputs = model_inputs(batch, model)
    assert set(inputs) == {"input_ids", "labels", "attention_mask"}
    kept = [DOCUMENTS[i] for i in (0, 2, 3)]
    assert loss(model, inputs) == pytest.approx(loss_alone(model, kept), abs=1e-5)


def test_cut_document_predicts_the_next_token_only_within_a_row() -> None:
    encoder = LanguageModelingEncoder(max_length=4)
    pieces: Any = encoder.encode(sample({"txt": "abcdefgh"}), Rng(7))
    first, second, third = pieces
    assert third["tokens"].tolist() == [*b"h", EOS]
    inputs = model_inputs(encoder.batch([first, second], Rng(7)), random_model("Llama"))
    assert inputs["labels"].tolist() == [[-100, 97, 98, 99], [-100, *b"efg"]]
    wide = LanguageModelingEncoder(max_length=8)
    inputs = model_inputs(wide.batch([wide.pack([first, third], Rng(7))], Rng(7)), random_model("Llama"))
    assert inputs["labels"][0, :5].tolist() == [-100, 97, 98, 99, 100]  # d, behind c, at the place of another document


def test_only_answers_contribute_to_the_loss_of_packed_chats() -> None:
    chats = [[("What?", "A cat."), ("Sure?", "Yes.")], [("Who?", "Me.")]]
    encoder, documents, items = ChatEncoder(), [], []
    for turns in chats:
        said, ids, labels = [], list[int](), list[int]()
        for question, answer in turns:
            said += [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
            asked = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n".encode()
            answered = f"{answer}<|im_end|>\n".encode()
            ids += [*asked, *answered]
            labels += [*[-100] * len(asked), *answered]
        documents.append(Document(ids, labels))
        items.append(item(encoder, sample({"json": {"conversations": said}})))
    model = random_model("Llama")
    for rows in ([encoder.pack(items, Rng(7))], items):
        inputs = model_inputs(encoder.batch(rows, Rng(7)), model)
        assert loss(model, inputs) == pytest.approx(loss_alone(model, documents), abs=1e-5)


# What a model learns.


def test_doubly_shifted_labels_are_a_visible_error() -> None:
    letters, encoder = "abcdefghijklmnopqrstuvwxyz", LanguageModelingEncoder(max_length=32)
    texts = [(letters + letters)[start : start + 10] for start in range(26)]
    items = [item(encoder, sample({"txt": text})) for text in texts]
    batch = encoder.batch([encoder.pack(items[i : i + 2], Rng(7)) for i in range(0, 26, 2)], Rng(7))

    def learned_letter(inputs: dict[str, Any]) -> str:
        model = random_model("Llama").train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(60):
            model(**inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            return chr(int(model(input_ids=torch.tensor([[BOS, *b"defghij"]])).logits[0, -1].argmax()))

    assert learned_letter(model_inputs(batch, random_model("Llama"))) == "k"
    renamed = {"input_ids": batch["tokens"], "labels": batch["labels"], "position_ids": batch["position_ids"]}
    assert learned_letter({**renamed, "use_cache": False}) == "l"


# Images and videos.

PHOTOS = [np.random.default_rng(i).integers(0, 256, (16, 16, 3), np.uint8) for i in range(3)]
STORIES = [("seen: ", 0, "one"), ("and ", 1, "another photo"), ("last ", 2, "of all")]
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)


def normalized_pixels(photo: Any) -> torch.Tensor:
    """Return normalized pixels, float32 (3, height, width)."""
    levels = torch.from_numpy(photo).permute(2, 0, 1) / 255
    return (levels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def story_sample(text: str, photo: Any, more: str) -> Any:
    """Return a sample of a document with an image in the middle."""
    return sample({"json": {"texts": [text, None, more], "images": [None, "0.png", None]}, "0.png": png(photo)})


def llava() -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    parts = {"text_config": LlamaConfig(**TEXT), "vision_config": CLIPVisionConfig(**EYES, projection_dim=32)}
    return with_random_weights(
        LlavaForConditionalGeneration, LlavaConfig(**parts, image_token_id=IMAGE, vision_feature_layer=-1)
    )


def internvl() -> Any:
    from transformers import InternVLConfig, InternVLForConditionalGeneration, InternVLVisionConfig, Qwen2Config

    eyes: Any = InternVLVisionConfig(**{**EYES, "patch_size": [4, 4], "image_size": [16, 16]})
    parts = {"text_config": Qwen2Config(**TEXT), "vision_config": eyes}
    return with_random_weights(InternVLForConditionalGeneration, InternVLConfig(**parts, image_token_id=IMAGE))


def smolvlm() -> Any:
    from transformers import LlamaConfig, SmolVLMConfig, SmolVLMForConditionalGeneration

    parts = {"text_config": LlamaConfig(**TEXT).to_dict(), "vision_config": EYES}
    config = SmolVLMConfig(**parts, scale_factor=2, image_token_id=IMAGE, pad_token_id=0)
    return with_random_weights(SmolVLMForConditionalGeneration, config)


@pytest.mark.parametrize(("make", "merge"), [(llava, 1), (internvl, 2), (smolvlm, 2)])
def test_loss_of_packed_image_tiles_equals_that_of_single_documents(make: Any, merge: int) -> None:
    model = make()
    tiles = Tiles(4, merge, side=16, max_tiles=1)
    encoder = InterleavedEncoder(vision=Vision(tiles, IMAGE, mean=MEAN, std=STD))
    tokens, documents = [IMAGE] * (16 // merge**2), []
    for text, photo, more in STORIES:
        pixels = normalized_pixels(PHOTOS[photo])[None]
        pixels = pixels[None] if make is smolvlm else pixels
        documents.append(document_of((text, True), (tokens, False), (more, True), pixel_values=pixels))
    items = [item(encoder, story_sample(text, PHOTOS[photo], more)) for text, photo, more in STORIES]
    expected = loss_alone(model, documents)
    for rows in (items, [encoder.pack(items[:2], Rng(7)), items[2]]):
        assert loss(model, model_inputs(encoder.batch(rows, Rng(7)), model)) == pytest.approx(expected, abs=1e-5)


def qwen(attention: str = "sdpa", name: str = "Qwen2_5_VL") -> Any:
    import transformers

    eyes: dict[str, Any] = {"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 14}
    if name == "Qwen2_5_VL":
        eyes |= {"out_hidden_size": 32, "intermediate_size": 32, "window_size": 56, "fullatt_block_indexes": [1]}
        eyes["tokens_per_second"] = 2
    else:
        eyes |= {"embed_dim": 32, "mlp_ratio": 1}
    text = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    special = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 302}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=eyes, **special)
    return with_random_weights(getattr(transformers, f"{name}ForConditionalGeneration"), config, attention)


def token_kinds(document: Document) -> Document:
    """Return the kinds of tokens, from which the model computes positions in time, height and width."""
    types = torch.tensor([[{IMAGE: 1, VIDEO: 2}.get(token, 0) for token in document.ids]])
    return document._replace(more={**document.more, "mm_token_type_ids": types})


def qwen_stories(model: Any, **settings: Any) -> tuple[InterleavedEncoder, list[dict[str, Any]], list[Document]]:
    """Return an encoder, items, and their documents by the processor of `transformers`."""
    from transformers import Qwen2VLImageProcessor

    shapes = [(56, 84), (112, 56), (28, 140)]  # of photos that need not be resized
    photos = [np.random.default_rng(i).integers(0, 256, (*shape, 3), np.uint8) for i, shape in enumerate(shapes)]
    sizes = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}
    processor = Qwen2VLImageProcessor(size=sizes, image_mean=MEAN, image_std=STD)
    vision = Vision(NativeSize(14, 2, *sizes.values()), IMAGE, mean=MEAN, std=STD)
    rate = getattr(model.config.vision_config, "tokens_per_second", None)
    encoder = InterleavedEncoder(vision=vision, rope=MRope(rate), **settings)
    items, documents = [], []
    for (text, number, more), photo in zip(STORIES, photos, strict=True):
        seen = processor(images=[photo], return_tensors="pt")
        tokens = [IMAGE] * int(seen["image_grid_thw"].prod() // 4)
        documents.append(token_kinds(document_of((text, True), (tokens, False), (more, True), **seen)))
        items.append(item(encoder, story_sample(text, photos[number], more)))
    return encoder, items, documents


def test_qwen_gets_pixels_and_grids_like_from_its_processor() -> None:
    model = qwen()
    encoder, items, documents = qwen_stories(model)
    inputs = model_inputs(encoder.batch([encoder.pack(items, Rng(7))], Rng(7)), model)
    for name in ("pixel_values", "image_grid_thw"):
        theirs = torch.cat([document.more[name] for document in documents])
        torch.testing.assert_close(inputs[name], theirs, rtol=0, atol=1e-5)
    assert inputs["position_ids"].shape == (4, *inputs["input_ids"].shape)


@pytest.mark.parametrize("made_so", [("sdpa",), ("eager",), ("sdpa", "Qwen2VL")])
def test_loss_of_packed_qwen_images_equals_that_of_single_documents(made_so: tuple[str, ...]) -> None:
    model = qwen(*made_so)
    encoder, items, documents = qwen_stories(model)
    expected = loss_alone(model, documents)
    for rows in (items, [encoder.pack(items[:2], Rng(7)), items[2]], [encoder.pack(items, Rng(7))]):
        inputs = model_inputs(encoder.batch(rows, Rng(7)), model)
        assert loss(model, inputs) == pytest.approx(expected, abs=1e-5)
    packed = model_inputs(encoder.batch([encoder.pack(items, Rng(7))], Rng(7)), model)
    for wrong in (packed["position_ids"][1:], packed["position_ids"][0]):  # not in the document, not in space
        assert abs(loss(model, {**packed, "position_ids": wrong}) - expected) > 1e-4


@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Qwen2VL"])
def test_positions_in_image_packs_equal_those_of_single_documents(name: str, multiple: int) -> None:
    model = qwen(name=name)
    encoder, items, documents = qwen_stories(model, multiple=multiple)
    assert len({len(document.ids) % multiple for document in documents}) > 1 or multiple == 1
    for rows in ([encoder.pack(items, Rng(7))], [encoder.pack(items[:2], Rng(7)), encoder.pack(items[2:], Rng(7))]):
        batch = encoder.batch(rows, Rng(7))
        positions = model_inputs(batch, model)["position_ids"].flatten(1)  # int64 (4, B * T)
        begins = batch["cu_seqlens"].tolist()
        for begin, end, document in zip(begins, begins[1:], documents, strict=False):
            ids = torch.tensor([document.ids])
            more = {key: document.more[key] for key in ("mm_token_type_ids", "image_grid_thw")}
            theirs = model.model.get_rope_index(ids, **more)[0][:, 0]
            assert torch.equal(positions[1:, begin : begin + len(document.ids)], theirs)
            assert positions[0, begin:end].tolist() == list(range(end - begin))  # the padding is its document's end
            beyond = positions[1:, begin + len(document.ids) : end]
            assert (beyond.diff() == 1).all() and (beyond > theirs.max()).all()
        expected = loss_alone(model, documents)
        assert loss(model, model_inputs(batch, model)) == pytest.approx(expected, abs=1e-5)


def test_packed_qwen_texts_do_not_attend_to_each_other() -> None:
    model = qwen()
    for batch in (text_batch(), text_batch(None)):
        assert loss(model, model_inputs(batch, model)) == pytest.approx(loss_alone(model, DOCUMENTS), abs=1e-5)


def film_positions(grid: torch.Tensor, letters: int) -> torch.Tensor:
    """int64 (3, 1, T) of a beginning, a video of steps a second apart, letters and an end, as the paper has them."""
    steps, rows, columns = grid.tolist()
    places = [(0, 0, 0)]
    places += [(1 + 2 * t, 1 + h, 1 + w) for t in range(steps) for h in range(rows // 2) for w in range(columns // 2)]
    behind = max(map(max, places)) + 1
    places += [(behind + i,) * 3 for i in range(letters + 1)]
    return torch.tensor(places).T[:, None]


def test_loss_of_packed_qwen_videos_equals_that_of_single_documents() -> None:
    model = qwen()
    vision = Vision(NativeSize(14, 2, 28 * 28, 28 * 28 * 64), IMAGE, mean=MEAN, std=STD)
    video = VideoTokens(VIDEO, min_pixels=28 * 28, max_pixels=28 * 28 * 4, mean=MEAN, std=STD)
    encoder = InterleavedEncoder(vision=vision, video=video, rope=MRope(2))
    items, documents = [], []
    for seconds, text in ((2, "short"), (3, "a longer film")):
        lists = {"texts": [None, text], "images": [None, None], "videos": ["0.mp4", None]}
        parts = {"json": lists, "0.mp4": video_bytes(seconds * 12, fps=12, size=(56, 56), noise=60)}
        one = item(encoder, sample(parts))
        pixels = one["video_patches"].float() / 255
        for channel in range(3):
            pixels[:, channel] = (pixels[:, channel] - MEAN[channel]) / STD[channel]
        more = {"pixel_values_videos": pixels.flatten(1), "video_grid_thw": one["video_grids"]}
        tokens = [VIDEO] * int(one["video_grids"].prod() // 4)
        more["position_ids"] = film_positions(one["video_grids"][0], len(text))
        documents.append(document_of((tokens, False), (text, True), **more))
        items.append(one)
    inputs = model_inputs(encoder.batch([encoder.pack(items, Rng(7))], Rng(7)), model)
    assert loss(model, inputs) == pytest.approx(loss_alone(model, documents), abs=1e-5)


def test_git_gets_the_images_of_captions() -> None:
    from transformers import GitConfig, GitForCausalLM

    config = GitConfig(vision_config={**EYES}, **SMALL, vocab_size=VOCABULARY, max_position_embeddings=64)
    model = with_random_weights(GitForCausalLM, config, "eager")
    encoder = CaptioningEncoder(image_size=16, augment=False, mean=MEAN, std=STD)
    items = [item(encoder, sample({"png": png(photo), "txt": f"photo {i}" * i})) for i, photo in enumerate(PHOTOS, 1)]
    captions = [f"photo {i}" * i for i in (1, 2, 3)]
    pairs = zip(captions, PHOTOS, strict=True)
    documents = [document_of((text, True), pixel_values=normalized_pixels(photo)[None]) for text, photo in pairs]
    inputs = model_inputs(encoder.batch(items, Rng(7)), model)
    assert loss(model, inputs) == pytest.approx(loss_alone(model, documents), abs=1e-5)
    with pytest.raises(ValueError, match=r"'image' in packs, which git does not take\. Remove the packer"):
        model_inputs(encoder.batch([encoder.pack(items, Rng(7))], Rng(7)), model)
    with pytest.raises(
        ValueError, match=r"'image', which llama does not take\. Use ChatEncoder or .* or one of these models: git\."
    ):
        model_inputs(encoder.batch(items, Rng(7)), random_model("Llama"))


# Flash attention, by a stand-in for its kernels that knows nothing but their borders.


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    use_plain_flash(monkeypatch)


def with_flash(model: Any) -> Any:
    """Return the same model, as if it had been loaded with flash attention."""
    for part in model.modules():
        if hasattr(part, "config"):
            part.config._attn_implementation = "flash_attention_2"
    return model


def test_flash_attention_separates_packed_texts(flash: None) -> None:
    expected, model = loss_alone(random_model("Llama"), DOCUMENTS), with_flash(random_model("Llama"))
    for packs in ([[0, 1], [2, 3]], [[0, 1, 2, 3]], None):
        inputs = model_inputs(text_batch(packs), model)
        assert loss(model, inputs) == pytest.approx(expected, abs=1e-5)
    del inputs["attention_mask"]
    inputs = {**model_inputs(text_batch(), model), **dict.fromkeys(("cu_seq_lens_q", "max_length_q"))}
    assert loss(model, inputs) == pytest.approx(expected, abs=1e-5), "models that pass position_ids on alone"


def test_flash_attention_separates_packed_qwen_images(flash: None) -> None:
    encoder, items, documents = qwen_stories(qwen())
    expected, model = loss_alone(qwen(), documents), with_flash(qwen())
    for rows in ([encoder.pack(items[:2], Rng(7)), items[2]], items):
        inputs = model_inputs(encoder.batch(rows, Rng(7)), model)
        assert loss(model, inputs) == pytest.approx(expected, abs=1e-5)


# What is refused.


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("Mamba", {}, "carry a state over tokens"),
        ("RecurrentGemma", {}, "carry a state over tokens"),
        ("Lfm2", {"layer_types": ["conv"] * 32}, r"carry a state over tokens \(conv\)"),
        ("Bloom", {}, "its masks ignore position_ids"),
        ("OPT", {}, "its masks ignore position_ids"),
        ("GptOss", {}, "its masks ignore position_ids"),
        ("Bert", {"is_decoder": True}, "its masks ignore position_ids"),
        ("Qwen3VL", {}, "how it attends is not known here"),
    ],
)
def test_packs_are_rejected_for_models_that_would_mix_documents(name: str, settings: Any, why: str) -> None:
    import transformers

    config = getattr(transformers, f"{name}Config")(**settings)
    with pytest.raises(ValueError, match=f"{config.model_type}: .*{why}.*Remove the packer"):
        model_inputs(text_batch(), config)
    assert "attention_mask" in model_inputs(text_batch(None), config)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("Bloom", {"n_layer": 2, "n_head": 4}), ("Mamba", {"state_size": 4}), ("OPT", {"word_embed_proj_dim": 32})],
)
def test_single_document_rows_fit_any_causal_model(name: str, settings: Any) -> None:
    model = random_model(name, "eager", **settings)
    assert loss(model, model_inputs(text_batch(None), model)) == pytest.approx(loss_alone(model, DOCUMENTS), abs=1e-5)


def test_packs_are_rejected_if_attention_gets_no_mask() -> None:
    model = random_model("Llama")
    model.config._attn_implementation = "own_kernel"
    with pytest.raises(ValueError, match="attention 'own_kernel' does not learn where documents begin"):
        model_inputs(text_batch(), model)


def test_invalid_batch_or_model_is_named() -> None:
    model = random_model("Llama")
    batch = text_batch()
    with pytest.raises(ValueError, match=r"This batch has labels, tokens\.$"):
        model_inputs({name: batch[name] for name in ("tokens", "labels")}, model)
    with pytest.raises(TypeError, match=r"not Linear\. For your own model, use the batch as it is"):
        model_inputs(batch, torch.nn.Linear(1, 1))
    whole = text_batch([[0, 1, 2, 3]], multiple=4)
    with pytest.raises(ValueError, match="not parts of cut_context"):
        model_inputs(cut_context(whole, 1, 2), model)

    from transformers import T5Config

    with pytest.raises(ValueError, match="t5 has an encoder"):
        model_inputs(batch, T5Config())


def test_media_that_a_model_does_not_accept_are_named() -> None:
    vision = Vision(NativeSize(4, 2, 64, 1024), IMAGE)
    encoder = InterleavedEncoder(vision=vision, audio=AudioTokens(305))
    seen = encoder.batch([item(encoder, story_sample("a", PHOTOS[0], "b"))], Rng(7))
    with pytest.raises(ValueError, match=r"'patches', which llama does not take\. Use one of these models: qwen"):
        model_inputs(seen, random_model("Llama"))
    with pytest.raises(ValueError, match=r"needs mrope_ids\. Set rope=MRope\(tokens_per_second=2\) in the encoder"):
        model_inputs(seen, qwen())
    with pytest.raises(ValueError, match=r"patches have \(3, 2, 4, 4\).*the model needs \(3, 2, 14, 14\)"):
        model_inputs({**seen, "mrope_ids": torch.zeros(1, 3)}, qwen())
    two = [item(encoder, story_sample("a", photo, "b")) for photo in (PHOTOS[0], PHOTOS[0][:8])]
    with pytest.raises(ValueError, match=r"internvl needs equal tiles, not \[\[2, 4\], \[4, 4\]\]"):
        model_inputs(encoder.batch(two, Rng(7)), internvl())
    document = {"texts": [None, "b"], "images": [None, None], "audios": ["0.wav", None]}
    heard = item(encoder, sample({"json": document, "0.wav": audio_bytes(1)}))
    with pytest.raises(ValueError, match=r"'audio_mels', which llama does not take\. Remove it from the batch"):
        model_inputs(encoder.batch([heard], Rng(7)), random_model("Llama"))


def test_silently_different_model_inputs_are_an_error() -> None:
    model, batch = random_model("Llama"), text_batch()
    inputs = model_inputs(batch, model)
    check_inputs(inputs, model)
    check_inputs(model_inputs(text_batch(None), model), model)
    cured = r"Return model_inputs\("
    for raw in (batch, {**inputs, "cu_seqlens": batch["cu_seqlens"]}):
        with pytest.raises(ValueError, match=rf"which LlamaForCausalLM does not take\. {cured}"):
            check_inputs(raw, model)
    ahead = {"input_ids": batch["tokens"], "labels": batch["labels"]}
    with pytest.raises(ValueError, match=f"the model shifts them again. {cured}"):
        check_inputs(ahead, model)
    same = {name: torch.full((1, 8), 5) for name in ("input_ids", "labels")}
    check_inputs(same, model)  # one word again and again, which is ahead and in place
    for other in (torch.nn.Linear(1, 1), type("Own", (type(model),), {"__module__": "own"})(model.config)):
        check_inputs(ahead, other)
    with_flash(model)
    with pytest.raises(ValueError, match="flash_attention_2, which misreads packs in several rows"):
        check_inputs(inputs, model)
    check_inputs(model_inputs(batch, model), model)
    check_inputs(model_inputs(text_batch(None), model), model)
