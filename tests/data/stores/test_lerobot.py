"""Episodes of a LeRobot folder: the right range of the right video, the right rows of frames; they train and resume."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.stores.source import recognize
from savable_pipeline.testing import assert_exact_resume
from tests.support.media_files import frame_number
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


def test_an_episode_has_its_videos_its_frames_and_what_its_row_says(folder: Path) -> None:
    check_episodes(folder)
    sample = sp.open_dataset(folder)["1"]
    told = ["episode_index", "tasks", "length", "dataset_from_index", "dataset_to_index"]
    assert list(sample) == [*told, TOP, "observation.state", "action", "index"]
    assert (sample.json("tasks"), sample.json(TOP)["end_s"]) == (["task 1"], 2.9)
    names = [name for name, samples, _ in sp.open_dataset(folder).dataset.manifest() if not samples]
    assert {name.rpartition(".")[2] for name in names} == {"json", "mp4", "parquet"} and len(names) == 6


def test_a_folder_of_lerobot_is_one_for_the_reader_of_parquet_too_and_no_other_version_is(folder: Path) -> None:
    reader = custom.ParquetReader(folder, sp.Lane(), shuffle=False, epochs=1)
    assert [sample.key for sample in reader] == ["0", "1", "2", "3"]
    assert next(custom.ParquetReader(folder, sp.Lane(), key="length", shuffle=False)).key == "12"
    assert next(custom.ParquetReader(folder / "data", sp.Lane(), shuffle=False)).json("index") == 0
    with pytest.raises(ValueError, match="leave out columns="):
        custom.ParquetReader(folder, sp.Lane(), columns=["action"])
    (folder / "meta/info.json").write_text(json.dumps({**INFO, "codebase_version": "v2.1"}))
    assert recognize(folder).kind.name == "parquet"


def test_an_episode_behind_a_url_is_that_of_the_disk(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "cache"))
    with serving(tmp_path) as server:
        use_as_s3(server, monkeypatch)
        check_episodes("s3://robot/")
        reader = custom.ParquetReader("s3://robot/", sp.Lane(), shuffle=False)
        assert next(reader).array("observation.state").shape == (12, 2)
        open_any(folder)  # which leaves its index there
        check_episodes(f"{server.url}/robot/")


@pytest.mark.parametrize(
    ("template", "named", "fault"),
    [
        ("../{video_key}/a.mp4", f"../{TOP}/a.mp4", "leads out"),
        ("{video_key.__class__}.mp4", "{video_key.__class__}.mp4", "none of the dataset's files"),
        ("{chunk_index:099999d}.mp4", "{chunk_index:099999d}.mp4", "none of the dataset's files"),
        (None, "", "leads out"),
    ],
)
def test_what_info_json_names_outside_of_the_folder_is_refused(
    tmp_path: Path, template: str | None, named: str, fault: str
) -> None:
    sample = sp.open_dataset(write_lerobot(tmp_path, video_path=template))[0]
    with pytest.raises(sp.ShardError, match=rf"row 0: names {re.escape(repr(named))}: .*{fault}"):
        sample.video(TOP)
    features = {**FEATURES, "../../x": FEATURES[TOP]}
    (tmp_path / "meta/info.json").write_text(json.dumps({**INFO, "features": features}))
    with pytest.raises(sp.ShardError, match=r"'videos/\.\./\.\./x/chunk_index' is no number"):
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


def test_episodes_train_and_a_resume_is_exact_with_workers_and_without(folder: Path) -> None:
    def pipeline(lane: sp.Lane) -> custom.Stage:
        samples = sp.ShuffleBuffer(custom.ParquetReader(folder, lane), size=3)
        return sp.Batcher(sp.Encode(samples, Windows()), size=2)

    assert assert_exact_resume(pipeline, lanes=2, steps=4, workers=(0, 1), after=1) > 4
