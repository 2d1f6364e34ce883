"""TSV files whose quotes are text, as those of Common Voice, and those of CSV writers."""

from __future__ import annotations

import csv
import io
import logging
from functools import partial
from pathlib import Path

import pyarrow.csv as pacsv
import pytest
from hypothesis import given
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline.errors import ShardError
from savable_pipeline.testing import assert_exact_resume
from tests.support.draws import scaled_examples

# sentences as in releases of Common Voice, where quotes are text: at starts, ends and in the middle, single and paired
SENTENCES = [
    "Joe Keaton disapproved of films, and Buster also had reservations about the medium.",
    '"Hello," she said.',
    'She said: "Hello."',
    '"Nothing is better than a good book."',
    'The so-called "city" is a village.',
    '""Getting to play someone as unrestricted as a vampire is a thrill,"" she says.',
    "\"I don't know",
    'why you say goodbye."',
    "It's 5\" wide.",
    '"',
    "Mae hi'n oer.",
]
HEADER = ["client_id", "path", "sentence", "up_votes", "age"]


def common_voice(path: Path, sentences: list[str], end: str = "\n", mark: str = "") -> Path:
    """The table of these sentences as Common Voice writes it: no cell is quoted."""
    rows = [HEADER, *([f"c{n}", f"common_voice_en_{n}.mp3", text, "2", ""] for n, text in enumerate(sentences))]
    path.write_bytes((mark + "".join("\t".join(row) + end for row in rows)).encode())
    return path


def unquoted(path: Path) -> list[dict[str, str | None]]:
    """The rows as pyarrow reads them without quoting, as strings."""
    names = path.read_text(encoding="utf-8-sig").partition("\n")[0].rstrip("\r").split("\t")
    found = pacsv.read_csv(
        path,
        parse_options=pacsv.ParseOptions(delimiter="\t", quote_char=False),
        convert_options=pacsv.ConvertOptions(column_types=dict.fromkeys(names, "string")),
    )
    return [{name: cell or None for name, cell in row.items()} for row in found.to_pylist()]


def quoted(path: Path) -> list[dict[str, str | None]]:
    """The rows as Python's csv reads them with quotes."""
    with path.open(newline="") as file:
        header, *rows = csv.reader(file, delimiter="\t", strict=True)
    return [dict(zip(header, (cell or None for cell in row), strict=True)) for row in rows]


def rows_in(path: Path) -> list[dict[str, str | None]]:
    samples = sp.open_dataset(path, file_fields=())
    return [samples[number].json() for number in reversed(range(len(samples)))][::-1]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_quotes_of_common_voice_are_text(tmp_path: Path, end: str, mark: str) -> None:
    path = common_voice(tmp_path / "train.tsv", SENTENCES, end, mark)
    rows = rows_in(path)
    assert [row["sentence"] for row in rows] == SENTENCES
    assert rows == unquoted(path)


def test_a_quote_that_a_later_row_closes_joins_no_rows(tmp_path: Path) -> None:
    path = common_voice(tmp_path / "train.tsv", ['"Hello', "Well", 'goodbye"'])
    assert len(quoted(path)) == 1  # a strict CSV reader finds no fault
    assert rows_in(path) == unquoted(path) and len(rows_in(path)) == 3


@scaled_examples(60)
@given(sentences=st.lists(st.text('ab",. ', min_size=1, max_size=6), min_size=1, max_size=6))
def test_no_row_is_joined_or_lost(tmp_path_factory: pytest.TempPathFactory, sentences: list[str]) -> None:
    path = common_voice(tmp_path_factory.mktemp("in") / "train.tsv", sentences)
    rows = rows_in(path)
    assert [row["path"] for row in rows] == [f"common_voice_en_{n}.mp3" for n in range(len(sentences))]
    assert rows in (unquoted(path), *([quoted(path)] if '"' in path.read_text() and csv_writer_like(sentences) else ()))


def csv_writer_like(sentences: list[str]) -> bool:
    """Whether a CSV writer may have written all of these cells."""
    texts = [sentence for sentence in sentences if '"' in sentence]
    return all(
        text[0] == text[-1] == '"' and len(text) > 1 and '"' not in text[1:-1].replace('""', "") for text in texts
    )


@scaled_examples(40)
@given(
    cells=st.lists(st.tuples(*[st.text('ab",. \t\n', max_size=6)] * 3), min_size=1, max_size=6),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
)
def test_cells_of_a_csv_writer_lose_their_quotes(
    tmp_path_factory: pytest.TempPathFactory, cells: list[tuple[str, ...]], quoting: int
) -> None:
    text = io.StringIO(newline="")
    csv.writer(text, delimiter="\t", quoting=quoting, lineterminator="\n").writerows([("a", "b", "c"), *cells])
    path = tmp_path_factory.mktemp("in") / "a.tsv"
    path.write_bytes(text.getvalue().encode())
    try:
        assert rows_in(path) == quoted(path)
    except ShardError as error:  # a cell like a row of its own: tabs as in a row, before and after a line end
        assert "quotes join the lines" in str(error) and any(cell.count("\t") > 1 for row in cells for cell in row)


@pytest.mark.parametrize(
    ("sentences", "are_text"),
    [
        (['"Hello."', "Goodbye."], True),  # a writer that quotes for a dot quotes both
        (['"Hello there"', "Goodbye"], False),  # one may quote cells with blanks, as Perl's Text::CSV does
        (['"Hello, you."', "Goodbye."], False),  # or cells with commas, as Excel does
        (['"#tag"', "a #tag"], False),  # or those that start with a sign
        (['"007"', "8"], False),  # or numbers that are to remain text, as R's write.table does
        (['"yes"', "perhaps not.", "no"], False),
        (['"yes"', '"No."', "Never."], True),  # a cell without signs shows nothing, but others may
        (['"a ""word"""', "b"], False),  # quotes in quoted cells are doubled
        (['"a ""word"""', 'b "word"'], True),
        (['"Hello."', '"Goodbye."'], False),  # all cells of a column
        (['""', "b"], False),  # an empty text, as Polars writes it
    ],
)
def test_quoted_cells_are_compared_with_the_others_of_their_column(
    tmp_path: Path, sentences: list[str], are_text: bool
) -> None:
    path = common_voice(tmp_path / "a.tsv", sentences)
    assert rows_in(path) == (unquoted if are_text else quoted)(path)


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        (
            "a.tsv",
            'a\tb\n1\t"x" y\n2\n',
            r"a\.tsv:2: .*expected after.*JSONL, or give line 3 as many cells as the first",
        ),
        ("a.tsv", 'a\tb\n1\t"x\n2\ty"\n3\n', r"a\.tsv:2: .*quotes join the lines to 3 into one.*or give line 4"),
        ("a.tsv", 'a\n"x\ny"\n', r"a\.tsv:2: .*quotes join the lines to 3 into one row.*again as JSONL$"),
        ("a.tsv", 'a\tb\n1\t"say ""x"""\n2\t"cut', r"a\.tsv:3: .*unexpected end of data"),
        ("a.tsv", '"a"\t"b"\n"1"\t"x" y\n', r"a\.tsv:2: .*expected after.*JSONL$"),
        ("a.csv", 'a,b\n1,"x" y\n', r"a\.csv:2: .*expected after '\"'\. Write it again as JSONL$"),
    ],
)
def test_files_that_could_be_neither_are_an_error(tmp_path: Path, name: str, text: str, match: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ShardError, match=match):
        sp.open_dataset(tmp_path / name)


def test_the_decision_is_read_from_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = common_voice(tmp_path / "train.tsv", SENTENCES)
    rows = rows_in(path)

    def never(*_: object) -> bool:
        raise AssertionError("decided again")

    monkeypatch.setattr("savable_pipeline.data.stores.csv_table.quotes_are_text", never)
    assert rows_in(path) == rows


def sentences_of(path: Path, lane: sp.Lane) -> sp.BatchStage:
    from savable_pipeline import custom

    return sp.Batcher(sp.ShuffleBuffer(custom.CsvReader(path, lane, file_fields=()), size=5), size=3)


def test_run_over_plain_text_resumes_exactly(tmp_path: Path) -> None:
    path = common_voice(tmp_path / "train.tsv", SENTENCES * 3)
    assert assert_exact_resume(partial(sentences_of, path), seed=3, lanes=2, steps=6, chains=1)


def test_other_dialects_are_read_or_explained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    rows = [["text", "n"], ["a,b", "1"], ["größe", "2"]]
    for name, separator, end, encoding in (
        ("semicolons.csv", ";", "\r\n", "utf-8-sig"),  # as Excel writes it where commas are decimal points
        ("returns.csv", ",", "\r", "utf-8"),
        ("returns.tsv", "\t", "\r", "utf-8"),
    ):
        text = io.StringIO(newline="")
        csv.writer(text, delimiter=separator, lineterminator=end).writerows(rows)
        (tmp_path / name).write_bytes(text.getvalue().encode(encoding))
        assert rows_in(tmp_path / name) == [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    (tmp_path / "excel.tsv").write_bytes("text\tn\r\na\t1\r\n".encode("utf-16"))
    with pytest.raises(ShardError, match=r"excel\.tsv: text in UTF-16, where UTF-8 is read; `iconv -f UTF-16 -t UTF-8"):
        sp.open_dataset(tmp_path / "excel.tsv")
