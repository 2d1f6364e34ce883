"""Episodes of a LeRobot folder: the right range of the right video, the right rows of frames; they train and resume."""

from __future__ import annotations

import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.media.video import Video
from savable_pipeline.data.shards.byte_source import ByteSource, RangeFile
from savable_pipeline.data.stores.opening import find_source, index_any
from savable_pipeline.errors import MediaError
from savable_pipeline.testing import assert_exact_resume
from tests.support.media_files import frame_number, joined_without_decoding, video_bytes
from tests.support.toy_lerobot import FEATURES, FPS, INFO, LENGTHS, TOP, write_lerobot
from tests.support.toy_server import serving, use_as_s3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_lerobot(tmp_path / "robot")


def check_episodes(files: Any) -> None:
    data, firsts = sp.open_dataset(files), np.cumsum([0, *LENGTHS])
    assert [sample.key for sample in data] == ["0", "1", "2", "3"]
    for number, sample in enumerate(data):
        frames = np.arange(LENGTHS[number])
        state = sample.array("observation.state")
        assert state.dtype == np.float32 and state.shape == (len(frames), 2) and state.flags.writeable
        assert np.array_equal(state[:, 1], firsts[number] + frames)
        action = np.load(io.BytesIO(sample["action"]))
        assert np.array_equal(action[:, 2, 0], frames) and (action[:, :, 1] == number).all()
        video = sample.video(TOP)
        assert video.duration_s == pytest.approx(len(frames) / FPS) and video.frame_count is None
        shown = [frame_number(frame) for frame in video.frames((frames / FPS).tolist())]
        assert shown == state[:, 0].tolist()
        assert [frame_number(frame) for frame in video.frames_by_index(frames.tolist())] == shown


def test_episode_has_its_videos_frames_and_row_values(folder: Path) -> None:
    check_episodes(folder)
    sample = sp.open_dataset(folder)["1"]
    told = ["episode_index", "tasks", "length", "dataset_from_index", "dataset_to_index"]
    assert list(sample) == [*told, TOP, "observation.state", "action", "task", "index"]
    assert (sample.json("tasks"), sample.json(TOP)["end_s"]) == (["task 1"], 2.9)
    assert sample.json("task") == [f"pick {frame}" for frame in range(17)]
    names = [name for name, samples, _ in sp.open_dataset(folder).dataset.manifest() if not samples]
    assert {name.rpartition(".")[2] for name in names} == {"json", "mp4", "parquet"} and len(names) == 6


def test_lerobot_folder_of_its_version_is_readable_as_parquet(folder: Path) -> None:
    reader = custom.ParquetReader(folder, sp.Lane(), shuffle=False, epochs=1)
    assert [sample.key for sample in reader] == ["0", "1", "2", "3"]
    assert next(custom.ParquetReader(folder, sp.Lane(), key="length", shuffle=False)).key == "12"
    assert next(custom.ParquetReader(folder / "data", sp.Lane(), shuffle=False)).json("index") == 0
    with pytest.raises(ValueError, match="columns= does not apply to episodes"):
        custom.ParquetReader(folder, sp.Lane(), columns=["action"])
    (folder / "meta/info.json").write_text(json.dumps({**INFO, "codebase_version": "v2.1"}))
    for files in (folder, str(folder)):
        with pytest.raises(sp.ShardError, match=r"LeRobot v2\.1, but only v3\.0 .* convert_dataset_v21_to_v30"):
            sp.open_dataset(files)
    assert find_source(folder / "data").format.name == "parquet"


def test_remote_episode_equals_the_local_one(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "cache"))
    with serving(tmp_path) as server:
        use_as_s3(server, monkeypatch)
        check_episodes("s3://robot/")
        reader = custom.ParquetReader("s3://robot/", sp.Lane(), shuffle=False)
        assert next(reader).array("observation.state").shape == (12, 2)
        index_any(folder, processes=1)
        check_episodes(f"{server.url}/robot/")


def test_cameras_that_are_images_are_read_like_videos(tmp_path: Path) -> None:
    """As by LeRobot, whose frames are Pillow's."""
    for number, sample in enumerate(sp.open_dataset(write_lerobot(tmp_path, images=True))):
        count, state = LENGTHS[number], sample.array("observation.state")[:, 0]
        assert TOP in list(sample)
        with sample.video(TOP) as video:
            assert (video.duration_s, video.fps, video.size, video.frame_count) == (count / FPS, FPS, (64, 48), count)
            shown = video.frames([frame / FPS for frame in range(count)])
            assert shown.dtype == np.uint8 and [frame_number(frame) for frame in shown] == state.tolist()
            assert frame_number(video.frames([count / FPS], size=(32, 24))[0]) == state[-1]
            images = [np.asarray(Image.open(io.BytesIO(row["bytes"]))) for row in rows_of(tmp_path, number)]
            assert np.array_equal(video.frames_by_index(range(count)).transpose(0, 2, 3, 1), images)
            for wrong in (-1, count):
                with pytest.raises(IndexError, match=f"there are {count}"):
                    video.frames_by_index([wrong])
        with zipfile.ZipFile(io.BytesIO(sample[TOP])) as archive:
            assert len(archive.namelist()) == count and archive.testzip() is None
        clip = sp.Clips(length_s=0.5, fps=FPS).one(sample.video(TOP), sp.Rng(7))
        assert clip.frames is not None and clip.frames.shape == (5, 3, 48, 64)


def rows_of(folder: Path, episode: int) -> list[dict[str, Any]]:
    files = sorted((folder / "data").rglob("*.parquet"))
    table = pa.concat_tables([pq.read_table(file) for file in files])
    return [row[TOP] for row in table.to_pylist() if row["episode_index"] == episode]


def test_an_image_without_its_bytes_is_damage(tmp_path: Path) -> None:
    path = write_lerobot(tmp_path, images=True) / "data/chunk-000/file-001.parquet"
    table = pq.read_table(path)
    rows = [{**row, "bytes": None} if n == 2 else row for n, row in enumerate(table[TOP].to_pylist())]
    place = table.schema.get_field_index(TOP)
    pq.write_table(table.set_column(place, table.schema.field(TOP), pa.array(rows, table.schema.field(TOP).type)), path)
    with pytest.raises(sp.ShardError, match=rf"row 1: frame 2 of '{TOP}' has only the path"):
        sp.open_dataset(tmp_path)[1].video(TOP)


@pytest.mark.parametrize("lacking", [1, 2])
def test_frames_missing_in_the_video_are_damage_by_time_and_by_index(tmp_path: Path, lacking: int) -> None:
    data = sp.open_dataset(write_lerobot(tmp_path, lacking=lacking))
    for episode, last in ((2, LENGTHS[2] - 1), (3, LENGTHS[3] - 1)):
        video = data[episode].video(TOP)
        assert frame_number(video.frames([(last - lacking) / FPS])[0]) == frame_number(
            video.frames_by_index([last - lacking])[0]
        )
        fault = rf"{TOP}.*: its metadata lists {last + 1} frames, and the video has {last + 1 - lacking}\. "
        for missing in range(last + 1 - lacking, last + 1):
            with pytest.raises(MediaError, match=fault):
                video.frames([missing / FPS])
            with pytest.raises(MediaError, match=fault):
                video.frames_by_index([missing])
        with pytest.raises(IndexError):
            video.frames_by_index([last + 1])
    assert data[1].video(TOP).frames_by_index([LENGTHS[1] - 1]).shape == (1, 3, 48, 64)


@pytest.mark.parametrize("b_frames", [0, 2])
def test_joined_videos_show_the_frames_of_their_episodes(b_frames: int) -> None:
    """As `lerobot-edit-dataset --operation.type=merge` joins files, and says where episodes start: by their lengths.

    Rounded times add up: here to two ticks without, and to a third of a frame with frames that refer to later ones.
    """
    count, rate, length = 16, 30, 17
    data = joined_without_decoding(
        [video_bytes(length, fps=rate, b_frames=b_frames, numbers_from=length * number) for number in range(count)]
    )
    for number in range(count):
        file = RangeFile(ByteSource.of(data), number * length / rate, (number + 1) * length / rate, rate)
        with Video(file, "the part", begin_s=file.begin_s, end_s=file.end_s) as video:
            numbers = list(range(number * length, (number + 1) * length))
            times = np.arange(length, dtype=np.float32) / rate  # the column `timestamp` is float32
            assert [frame_number(frame) for frame in video.frames(times.tolist())] == numbers
            assert [frame_number(frame) for frame in video.frames_by_index(range(length))] == numbers
            assert frame_number(video.frames([length / rate])[0]) == numbers[-1]


@pytest.mark.parametrize(
    ("template", "named", "fault"),
    [
        ("../{video_key}/a.mp4", f"../{TOP}/a.mp4", "leads out"),
        ("{video_key.__class__}.mp4", "{video_key.__class__}.mp4", "not a file of the dataset"),
        ("{chunk_index:099999d}.mp4", "{chunk_index:099999d}.mp4", "not a file of the dataset"),
        (None, "", "leads out"),
    ],
)
def test_paths_outside_of_the_folder_in_info_json_are_rejected(
    tmp_path: Path, template: str | None, named: str, fault: str
) -> None:
    sample = sp.open_dataset(write_lerobot(tmp_path, video_path=template))[0]
    with pytest.raises(sp.ShardError, match=rf"row 0: names {re.escape(repr(named))}: .*{fault}"):
        sample.video(TOP)
    features = {**FEATURES, "../../x": FEATURES[TOP]}
    (tmp_path / "meta/info.json").write_text(json.dumps({**INFO, "features": features}))
    with pytest.raises(sp.ShardError, match=r"'videos/\.\./\.\./x/chunk_index' is not a number"):
        sp.open_dataset(tmp_path)[0].video("../../x")


def test_frames_of_another_episode_and_uneven_lists_are_damage(folder: Path) -> None:
    path = folder / "data/chunk-000/file-001.parquet"
    table = pq.read_table(path)
    uneven = pa.array([[1.0] * (1 + row % 2) for row in range(len(table))])
    pq.write_table(table.set_column(0, "observation.state", uneven), path)
    with pytest.raises(sp.ShardError, match=r"file-001.parquet: row group 0: no array 'observation.state': lists of"):
        sp.open_dataset(folder)[1].array("observation.state")
    pq.write_table(table.slice(1), path)
    with pytest.raises(sp.ShardError, match=r"row 1: frames 12 to 29, which .*file-001.parquet does not have"):
        sp.open_dataset(folder)[1].array("action")
    pq.write_table(pa.concat_tables([table.slice(0, 5), table.slice(6)]), path)
    with pytest.raises(sp.ShardError, match="are not the frames 12 to 29"):
        sp.open_dataset(folder)[1].array("action")


class Windows(sp.TaskEncoder):
    """A frame of an episode, drawn by its number, with the frame before it and the actions after it."""

    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        at = rng.integers(sample.json("length"))
        before, action = max(0, at - 1), sample.array("action")
        frames = sample.video(TOP).frames([before / FPS, at / FPS], size=(32, 24))
        return {"frames": frames, "state": sample.array("observation.state")[at], "action": action[at:][:1]}


def test_episodes_resume_exactly_with_and_without_workers(folder: Path) -> None:
    def pipeline(lane: sp.Lane) -> custom.Stage:
        samples = sp.ShuffleBuffer(custom.ParquetReader(folder, lane), size=3)
        return sp.Batcher(sp.Encode(samples, Windows()), size=2)

    assert assert_exact_resume(pipeline, lanes=2, steps=4, workers=(0, 1), after=1) > 4
