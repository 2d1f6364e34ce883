"""`ChatEncoder` and `InterleavedEncoder` with videos and sounds beside images."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from savable_pipeline.core.rng import Rng
from savable_pipeline.errors import MediaError
from savable_pipeline.stages.task_encoder import Skip
from savable_pipeline.trainers.context_parallel import cut_context, join_context
from savable_pipeline.trainers.micro_batches import split
from task_encoders.chat import ChatEncoder
from task_encoders.interleaved import InterleavedEncoder
from task_encoders.parts.audio_tokens import AudioTokens
from task_encoders.parts.chat_template import ChatML, OwnTemplate
from task_encoders.parts.image_tiles import Buckets, NativeSize, Tiles
from task_encoders.parts.medium import MRope
from task_encoders.parts.tokenizer import Tokenizer
from task_encoders.parts.video_tokens import VideoFrames, VideoTokens
from task_encoders.parts.vision import Vision
from tests.support.media_files import audio_bytes, frame_number, video_bytes
from tests.support.toy_samples import item, plain_png, sample, without_pixels, word_lengths

RNG = Rng(7)
IMAGE, VIDEO, AUDIO = 300, 301, 302
VISION = Vision(NativeSize(patch=2, merge=2, min_pixels=16, max_pixels=256), IMAGE)
VIDEOS = VideoTokens(
    VIDEO, patch=8, merge=2, fps=4, min_pixels=256, max_pixels=32 * 32, mean=(0.0,) * 3, std=(1.0,) * 3
)
AUDIOS = AudioTokens(AUDIO, before="(", after=")", bins=80)
ALL: dict[str, Any] = {"vision": VISION, "video": VIDEOS, "audio": AUDIOS, "rope": MRope()}
FILM, SHORT, SOUND = video_bytes(24, fps=12), video_bytes(6, fps=12), audio_bytes(0.4)


def chat_encoder(**settings: Any) -> ChatEncoder:
    """Return an encoder of all media with short texts around them."""
    return ChatEncoder(**{"template": ChatML("<", ">"), **ALL, **settings})


def sample_asking(question: str, **parts: bytes) -> Any:
    """Return a sample with a question, and parts named `0_mp4` for 0.mp4."""
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": "yes"}]
    return sample({"json": {"conversations": turns}, **{n.replace("_", "."): part for n, part in parts.items()}})


def tokens_as_text(made: dict[str, Any]) -> str:
    """Return the tokens as text, with `#` for those of images, `@` of videos and `~` of audio."""
    signs = {IMAGE: "#", VIDEO: "@", AUDIO: "~"}
    return "".join(signs.get(token) or chr(token) for token in made["tokens"].tolist())


def test_videos_and_audio_are_at_their_placeholders() -> None:
    parts = {"0_png": plain_png(8, 4), "0_flac": SOUND, "0_mp4": FILM, "1_mp4": SHORT}
    made = item(chat_encoder(), sample_asking("<video>a<audio>b<image>c<video>", **parts))
    assert tokens_as_text(made) == f"<user\n{'@' * 8}a({'~' * 10})b##c{'@' * 4}>\n<assistant\nyes>\n"
    assert made["video_grids"].tolist() == [[4, 2, 4], [2, 2, 4]]
    assert made["video_seconds"].tolist() == [0.5, 0.25]  # of 8 frames in 2 s, and of 4 in half a second
    assert (made["audio_mels"].shape, made["audio_frames"].tolist()) == ((40, 80), [40])
    assert made["mrope_ids"].shape == (len(made["tokens"]), 3)


def test_frames_are_sampled_at_the_rate() -> None:
    tokens = VideoTokens(VIDEO, patch=16, merge=1, fps=4, min_pixels=48 * 64, max_pixels=48 * 64)
    made = item(chat_encoder(video=tokens), sample_asking("<video>", mp4=FILM))
    steps, rows, columns = made["video_grids"][0].tolist()
    frames = made["video_patches"].view(steps, rows, columns, 3, 2, 16, 16).permute(0, 4, 3, 1, 5, 2, 6)
    frames = frames.reshape(2 * steps, 3, 16 * rows, 16 * columns).numpy()
    assert [frame_number(frame) for frame in frames] == [0, 3, 6, 9, 12, 15, 18, 21]


def test_content_lists_refer_to_videos_and_audio_in_order_or_by_part() -> None:
    content = [
        {"type": "video_url", "video_url": {"url": "1.mp4"}},
        {"type": "audio"},
        {"type": "video"},
        {"type": "text", "text": "?"},
    ]
    record = [{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}]
    parts = {"0.mp4": FILM, "1.mp4": SHORT, "wav": audio_bytes(0.4, container="wav")}
    made = item(chat_encoder(), sample({"json": record, **parts}))
    assert tokens_as_text(made) == f"<user\n{'@' * 4}({'~' * 10}){'@' * 8}?>\n<assistant\nyes>\n"


def test_template_of_parts_writes_video_and_audio_placeholders_itself() -> None:
    class Template:
        chat_template = "own"

        def apply_chat_template(self, messages: Any, **_: Any) -> str:
            signs = {"image": "$", "video": "%", "audio": "&"}
            said = [signs.get(part["type"]) or part["text"] for message in messages for part in message["content"]]
            return "".join(said)

    media = {"vision": Vision(VISION.tiles, IMAGE, text="$"), "video": VideoTokens(**{**vars(VIDEOS), "text": "%"})}
    media["audio"] = AudioTokens(AUDIO, text="&")
    encoder = ChatEncoder(template=OwnTemplate(Template(), content="parts"), **media)
    made = item(encoder, sample_asking("<audio>a<video>b<image>", mp4=FILM, flac=SOUND, png=plain_png(4, 4)))
    assert tokens_as_text(made) == f"{'~' * 10}a{'@' * 8}b#yes"


def test_frames_are_images_for_models_without_video() -> None:
    encoder = chat_encoder(
        video=VideoFrames(fps=1, min_frames=1, tiles=NativeSize(2, 2, 16, 16)), audio=None, rope=None
    )
    made = item(encoder, sample_asking("<image>?<video>!", mp4=FILM, png=plain_png(4, 4)))
    assert tokens_as_text(made) == "<user\n#?Frame1: #\nFrame2: #!>\n<assistant\nyes>\n"
    assert made["tile_counts"].tolist() == [1, 1, 1]
    assert encoder.images(made) == 3


def test_documents_have_videos_and_audio_in_their_own_lists() -> None:
    record = {
        "texts": ["a bb", None, "ccc", None, None],
        "images": [None, None, None, "0.png", None],
        "videos": [None, "0.mp4", None, None, None],
        "audios": [None, None, None, None, "https://somewhere/x"],
    }
    parts = {"json": record, "0.mp4": SHORT, "0.png": plain_png(4, 4), "0.flac": SOUND}
    audio = AudioTokens(AUDIO, bins=80)
    encoder = InterleavedEncoder(Tokenizer(word_lengths, bos=8, eos=9), **{**ALL, "audio": audio})
    made = item(encoder, sample(parts))
    assert made["tokens"].tolist() == [8, 1, 2, *[VIDEO] * 4, 3, IMAGE, *[AUDIO] * 10, 9]
    del record["audios"], parts["0.flac"]
    record["texts"][4] = "dd"
    assert item(encoder, sample(parts))["tokens"].tolist() == [8, 1, 2, *[VIDEO] * 4, 3, IMAGE, 2, 9]


def test_long_document_is_cut_outside_videos_and_audio() -> None:
    record = {"texts": ["a bb", None, "ccc d", None], "images": [None] * 4}
    record |= {"videos": [None, "mp4", None, None], "audios": [None, None, None, "flac"]}
    given = sample({"json": record, "mp4": SHORT, "flac": SOUND})
    settings = {**ALL, "audio": AudioTokens(AUDIO, bins=80)}
    whole = item(InterleavedEncoder(Tokenizer(word_lengths, bos=8, eos=9), **settings), given)
    made: Any = InterleavedEncoder(Tokenizer(word_lengths, bos=8, eos=9), max_length=11, **settings).encode(given, RNG)
    first, second = made
    assert first["tokens"].tolist() == [8, 1, 2, *[VIDEO] * 4, 3, 1]
    assert second["tokens"].tolist() == [*[AUDIO] * 10, 9]
    for name in ("video_patches", "video_grids", "video_seconds", "audio_mels", "audio_frames"):
        assert torch.equal(torch.cat([first[name], second[name]]), whole[name])
    assert torch.equal(first["mrope_ids"], whole["mrope_ids"][:9])
    assert second["mrope_ids"].tolist() == [[n] * 3 for n in range(11)]
    for length, reason in ((9, "audio longer than max_length"), (3, "video longer than max_length")):
        skipped = InterleavedEncoder(Tokenizer(word_lengths), max_length=length, **settings).encode(given, RNG)
        assert isinstance(skipped, Skip)
        assert skipped.reason == reason


def test_packs_and_batches_have_media_in_token_order() -> None:
    encoder = chat_encoder(multiple=4)
    samples = [
        sample_asking("<video>", mp4=FILM),
        sample_asking("<audio><video>", mp4=SHORT, flac=SOUND),
        sample_asking("<audio>?", ogg=SOUND),
    ]
    items = [item(encoder, given) for given in samples]
    batch = encoder.batch([encoder.pack(items[:2], RNG), encoder.pack(items[2:], RNG)], RNG)
    for name in ("video_grids", "video_seconds", "audio_frames", "audio_mels"):
        assert torch.equal(batch[name], torch.cat([each[name] for each in items]))
    assert torch.equal(batch["video_patches"], torch.cat([each["video_patches"] for each in items]) / 255)
    assert (batch["video_counts"].tolist(), batch["audio_counts"].tolist()) == ([2, 0], [1, 1])
    assert batch["mrope_ids"].shape == (*batch["tokens"].shape, 3)
    begins = (batch["position_ids"] == 0).nonzero()
    assert len(begins) == len(batch["cu_seqlens"]) - 1
    assert all(batch["mrope_ids"][row, column].tolist() == [0, 0, 0] for row, column in begins.tolist())
    first = batch["mrope_ids"][0, : len(items[0]["tokens"])]
    assert torch.equal(first, items[0]["mrope_ids"])


@pytest.mark.parametrize("tiles", [VISION.tiles, Tiles(2, 2, 8, max_tiles=4), Buckets(2, 2, 64, 4, 16)])
@pytest.mark.parametrize("video", [VIDEOS, VideoFrames(fps=3, min_frames=1, tiles=Tiles(2, 2, 4))])
def test_length_of_an_item_is_computed_from_headers(tiles: Any, video: Any) -> None:
    encoder = chat_encoder(vision=Vision(tiles, IMAGE), video=video)
    sounds = {"0_wav": audio_bytes(1.2344, rate=22050, container="wav"), "1_ogg": audio_bytes(0.31, container="ogg")}
    samples = [
        sample_asking("<video> or <video>?", **{"0_mp4": video_bytes(31, fps=24), "1_webm": webm(17)}),
        sample_asking("<audio><audio>", **sounds),
        sample_asking("<video><image>", mp4=SHORT, png=plain_png(40, 17)),
        sample_asking("none"),
    ]
    for given in samples:
        made = item(encoder, given)
        assert encoder.length_of(given) == encoder.length(made)
        assert encoder.images_of(given) == encoder.images(made)


def webm(frames: int) -> bytes:
    """Return a video whose timestamps are whole milliseconds."""
    return video_bytes(frames, fps=12, codec="libvpx", container="webm", b_frames=0)


def test_length_is_known_without_decoding_except_for_skips() -> None:
    half = bytes(len(FILM) // 2)
    broken = FILM[: FILM.index(b"mdat") + 4] + half + FILM[FILM.index(b"mdat") + 4 + len(half) :]
    assert chat_encoder().length_of(sample_asking("<video>", mp4=broken)) == len(
        item(chat_encoder(), sample_asking("<video>", mp4=FILM))["tokens"]
    )
    with pytest.raises(MediaError):
        chat_encoder().encode(sample_asking("<video>", mp4=broken), RNG)
    assert ChatEncoder(vision=VISION).length_of(sample_asking("a")) is None  # as states of earlier releases have packed
    for unknown in (
        sample(mp4=FILM),
        sample(json=[{"role": "user", "content": "a"}]),
        sample_asking("<audio>", ogg=FILM),
    ):
        assert chat_encoder().length_of(unknown) is None
    assert chat_encoder(max_length=10).length_of(sample_asking("<video>", mp4=FILM)) is None


def test_the_parts_of_a_batch_are_the_batches_of_its_rows() -> None:
    encoder = chat_encoder(max_length=96, multiple=4)
    items = [
        item(encoder, given)
        for given in (
            sample_asking("<audio>", flac=SOUND),
            sample_asking("<video><image><video>", **{"0_mp4": SHORT, "1_mp4": FILM, "png": plain_png(4, 4)}),
            sample_asking("none"),
            sample_asking("<video><audio>", mp4=SHORT, flac=audio_bytes(0.3)),
        )
    ]
    for rows in (items, [encoder.pack([each], RNG) for each in items]):
        batch = encoder.batch(rows, RNG)
        parts = split(batch, 2)
        for part, own in zip(parts, (rows[:2], rows[2:]), strict=True):
            assert without_pixels(part) == without_pixels(encoder.batch(own, RNG))
        joined = join_context([cut_context(batch, rank, 2) for rank in range(2)])
        assert torch.equal(joined["mrope_ids"], batch["mrope_ids"])


@pytest.mark.parametrize(
    ("question", "parts", "message"),
    [
        ("<video>", {}, r"conversations\[0\].value: a place for video 1, but the sample has no video"),
        ("<video><video>", {"mp4": SHORT}, "a place for video 2, but the sample has mp4"),
        ("<audio>", {"mp4": SHORT}, "a place for audio 1, but the sample has no audio"),
        ("a", {"mp4": SHORT}, "video mp4 has no place in the text: 0 of 1 have"),
        ("<audio>", {"0_wav": SOUND, "1_wav": SOUND}, "audio 1.wav has no place in the text: 1 of 2 have"),
    ],
)
def test_a_conversation_that_does_not_fit_its_media_is_an_error(question: str, parts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chat_encoder().encode(sample_asking(question, **parts), RNG)


def test_damaged_media_are_data_errors_of_their_part() -> None:
    with pytest.raises(MediaError, match="part 'mp4' of sample 'a'"):
        chat_encoder().encode(sample_asking("<video>", mp4=FILM[:2000]), RNG)
    with pytest.raises(MediaError, match="part 'flac' of sample 'a'"):
        chat_encoder().encode(sample_asking("<audio>", flac=b"nothing"), RNG)


def test_without_video_and_audio_placeholders_are_text_and_parts_ignored() -> None:
    encoder = ChatEncoder(vision=VISION, template=ChatML("<", ">"))
    made = item(encoder, sample_asking("<video> and <audio>", mp4=FILM, flac=SOUND))
    assert tokens_as_text(made) == "<user\n<video> and <audio>>\n<assistant\nyes>\n"
    assert not {"video", "audio", "mrope"} & encoder.settings().keys()
    record = [{"role": "user", "content": [{"type": "video"}]}, {"role": "assistant", "content": "yes"}]
    with pytest.raises(ValueError, match=r"a place for video, but the encoder takes none. Pass video="):
        encoder.encode(sample({"json": record, "mp4": FILM}), RNG)


def test_ambiguous_placeholders_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"VideoFrames shows frames as images. Pass vision="):
        ChatEncoder(video=VideoFrames())
    for tiles in (NativeSize(4, 2), NativeSize(2, 1)):
        found = f"VideoFrames has tiles of patch={tiles.patch} and merge={tiles.merge}, Vision of 2 and 2"
        with pytest.raises(ValueError, match=found):
            ChatEncoder(vision=VISION, video=VideoFrames(tiles=tiles))
    alike = VideoFrames(text="<image>", tiles=VISION.tiles)
    for other in (VideoTokens(IMAGE), VideoTokens(VIDEO, text="<image>"), alike):
        with pytest.raises(ValueError, match="share a token or text="):
            ChatEncoder(vision=VISION, video=other)
    with pytest.raises(ValueError, match=r"itself has the audio token 97, which stands for audios"):
        ChatEncoder(audio=AudioTokens(97)).encode(sample_asking("a"), RNG)
