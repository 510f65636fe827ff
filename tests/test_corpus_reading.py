"""Every kind of input file gives its documents, unchanged; what cannot be read is named."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from ingest_helpers import run

from lmperf.corpus import events, lines, reading, records, tables, texts, window
from lmperf.records import InputError

PROSE = "It was a bright day.\nThe clocks struck.\n"
CHINESE = "话说天下大势，分久必合，合久必分。\n周末七国分争，并入于秦。\n"
SPANISH = "¿Dónde está el niño? Mañana vendrá.\n"


def zstd(data: bytes) -> bytes:
    """One zstd frame."""
    return pa.Codec("zstd").compress(data, asbytes=True)


# --- encodings


@pytest.mark.parametrize(
    ("content", "encoding", "expected", "recorded"),
    [
        (PROSE.encode(), None, PROSE, "utf-8"),
        (b"\xef\xbb\xbf" + CHINESE.encode(), None, CHINESE, "utf-8"),
        (CHINESE.encode("utf-16"), None, CHINESE, "utf-16-le"),
        (b"\xfe\xff" + CHINESE.encode("utf-16-be"), None, CHINESE, "utf-16-be"),
        (CHINESE.encode("utf-32"), None, CHINESE, "utf-32-le"),
        (CHINESE.encode("gb18030"), "gb18030", CHINESE, "gb18030"),
        (CHINESE.encode("utf-16-le"), "utf-16-le", CHINESE, "utf-16-le"),
        (PROSE.encode("utf-16-le"), "utf-16-le", PROSE, "utf-16-le"),
        ("天下大勢\n".encode("big5"), "big5", "天下大勢\n", "big5"),
        (SPANISH.encode("cp1252"), "cp1252", SPANISH, "cp1252"),
        (SPANISH.encode(), "cp1252", SPANISH, "utf-8"),  # valid UTF-8 comes before what is declared
    ],
)
def test_encodings_are_read_right(
    tmp_path: Path, content: bytes, encoding: str | None, expected: str, recorded: str
) -> None:
    got = run(tmp_path, {"a.txt": content}, encoding=encoding)
    assert got.texts == [expected]
    assert got.source["encodings"] == {recorded: 1}


@pytest.mark.parametrize(
    "content",
    [CHINESE.encode("gb18030"), SPANISH.encode("cp1252"), PROSE.encode("utf-16-le"), CHINESE.encode("utf-16-be")],
)
def test_an_undeclared_encoding_is_set_aside_not_guessed(tmp_path: Path, content: bytes) -> None:
    got = run(tmp_path, {"bad.txt": content, "good.txt": PROSE.encode()})
    assert got.texts == [PROSE]
    assert [(line["source"], line["file"], line["offset"], line["bytes"]) for line in got.quarantine] == [
        ("mine", "bad.txt", 0, len(content))
    ]
    assert got.quarantine[0]["reason"]


def test_auto_is_opt_in_and_recorded(tmp_path: Path) -> None:
    pytest.importorskip("charset_normalizer", reason="encoding: auto needs charset-normalizer")
    got = run(tmp_path, {"a.txt": (CHINESE * 40).encode("gb18030")}, encoding="auto")
    assert got.texts == [CHINESE * 40]
    assert list(got.source["encodings"]) != ["utf-8"]


@pytest.mark.parametrize("encoding", ["no-such", "hex", "rot13"])
def test_an_unknown_encoding_is_refused_before_anything_is_read(tmp_path: Path, encoding: str) -> None:
    with pytest.raises(InputError, match=encoding):
        run(tmp_path, {"a.txt": b"x"}, encoding=encoding)


# --- cleaning


@pytest.mark.parametrize(
    ("content", "expected", "counts"),
    [
        (b"a\r\nb\r\n", "a\nb\n", {"crlf": 2}),
        (b"a\rb", "a\nb", {"cr": 1}),
        (b"a lot of text and one nul\0!", "a lot of text and one nul!", {"nul": 1}),
        (b"bell\x07 and \x1b[1mbold\x7f", "bell and [1mbold", {"control": 3}),
        ("c1\u0081 nel\u0085 nbsp\u00a0".encode(), "c1 nel\u0085 nbsp\u00a0", {"control": 1}),
        (b"page\x0cbreak", "page\nbreak", {"page_break": 1}),
        (b"\xef\xbb\xbfmarked", "marked", {"byte_order_mark": 1}),
        ("line\u2028separator\u2029".encode(), "line\u2028separator\u2029", {}),
        (b"tab\tand trailing  \n\n", "tab\tand trailing  \n\n", {}),
    ],
)
def test_cleaning_is_declared_and_counted(
    tmp_path: Path, content: bytes, expected: str, counts: dict[str, int]
) -> None:
    got = run(tmp_path, {"a.txt": content})
    assert got.texts == [expected]
    assert got.source["cleaning"] == counts
    assert set(counts) <= set(got.manifest["cleaning"])


def test_lone_surrogates_in_json_are_replaced_and_counted(tmp_path: Path) -> None:
    got = run(tmp_path, {"a.jsonl": b'{"text": "a\\ud800b"}\n{"text": "pair \\ud83d\\ude00"}\n'})
    assert got.texts == ["a\ufffdb", "pair \U0001f600"]
    assert got.source["cleaning"] == {"surrogate": 1}


def test_nothing_and_blanks_are_counted_as_empty(tmp_path: Path) -> None:
    got = run(tmp_path, {"a.txt": b"", "b.txt": b" \n\t\n", "c.txt": PROSE.encode(), "d.txt": b"\xef\xbb\xbf"})
    assert got.texts == [PROSE]
    assert (got.source["empty"], got.source["quarantined"]) == (3, 0)


def test_an_empty_file_of_any_kind_costs_nothing(tmp_path: Path) -> None:
    names = ("a.jsonl", "a.json", "a.csv", "a.tsv", "a.html", "a.parquet", "a.arrow", "a.txt.gz", "a")
    got = run(tmp_path, {**dict.fromkeys(names, b""), "b.txt": PROSE.encode()})
    assert (got.texts, got.quarantine) == ([PROSE], [])


# --- compression, by content


PACKERS = {"gzip": gzip.compress, "zstd": zstd, "bzip2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("name", ["no suffix at all", "misleading.txt"])
def test_compression_is_seen_by_content(tmp_path: Path, kind: str, name: str) -> None:
    got = run(tmp_path, {name: PACKERS[kind](CHINESE.encode())})
    assert got.texts == [CHINESE]
    assert got.source["formats"] == {f"text.{kind}": 1}


@pytest.mark.parametrize("kind", PACKERS)
def test_all_members_of_a_compressed_file_are_read(tmp_path: Path, kind: str) -> None:
    pack = PACKERS[kind]
    content = pack(b'{"text": "one"}\n{"te') + pack(b'xt": "two"}\n') + pack(b'{"text": "three"}')
    assert run(tmp_path, {"a": content}).texts == ["one", "two", "three"]


@pytest.mark.parametrize("kind", PACKERS)
def test_a_truncated_tail_costs_only_the_tail(tmp_path: Path, kind: str) -> None:
    rows = [f"document {number} {'%x' % (number * 7919**9)}" for number in range(20_000)]
    whole = PACKERS[kind]("".join(json.dumps({"text": row}) + "\n" for row in rows).encode())
    got = run(tmp_path, {"a.jsonl.gz": whole[: len(whole) * 3 // 4], "b.txt": b"good"})
    assert got.texts[-1] == "good"
    kept = got.texts[:-1]
    assert kept == rows[: len(kept)]
    assert len(kept) > 1000 or kind in ("bzip2", "xz")  # those two have large blocks
    assert any("truncated" in line["reason"] for line in got.quarantine)


def test_a_truncated_text_is_no_document(tmp_path: Path) -> None:
    got = run(tmp_path, {"a.gz": gzip.compress(CHINESE.encode() * 500)[:-20], "b": b"good"})
    assert got.texts == ["good"]
    assert "truncated" in got.quarantine[0]["reason"]


# --- records


def jsonl(*records_: Any) -> bytes:
    """Records as JSON lines."""
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records_)


def test_json_lines_are_read_one_by_one(tmp_path: Path) -> None:
    content = jsonl({"id": 1, "text": "one"}, {"text": "two\u2028still two"}, {"text": None}, {"id": 4})
    content += b'{"text": "broken\n' + b'{"text": "a"}{"text": "b"}\n' + b'{"text": "\xff"}\n' + b"\n"
    content += jsonl({"text": ["no", "string"]}, {"text": 5}) + b'{"text": "last, no line feed"}'
    got = run(tmp_path, {"a.jsonl": content})
    assert got.texts == ["one", "two\u2028still two", "last, no line feed"]
    assert [line["line"] for line in got.quarantine] == [4, 5, 6, 7, 9, 10]
    assert got.source["empty"] == 1


@pytest.mark.parametrize("end", ["\n", "\n\n", "\r\n\r\n"])
def test_blank_lines_at_the_end_are_no_record(tmp_path: Path, end: str) -> None:
    files = {"a.jsonl": '{"text": "one"}\n{"text": "two"}', "b.csv": "id,text\n1,three\n2,four", "c.json": '["five"]'}
    got = run(tmp_path, {name: (content + end).encode() for name, content in files.items()})
    assert (got.texts, got.quarantine) == (["one", "two", "three", "four", "five"], [])


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\u0085"])
def test_only_line_feeds_end_a_line(tmp_path: Path, mark: str) -> None:
    text = f"one{mark}still one"
    files = {
        "a.txt": text.encode(),
        "b.jsonl": jsonl({"text": text + "b"}, {"text": "two"}),
        "c.csv": table(["id", "text"], [["1", text + "c"], ["2", "three"]]).encode(),
        "d.json": json.dumps([text + "d"], ensure_ascii=False).encode(),
    }
    got = run(tmp_path, files)
    assert (got.texts, got.quarantine) == ([text, text + "b", "two", text + "c", "three", text + "d"], [])


def test_a_mark_and_crlf_change_no_record(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + jsonl({"text": "one"}, {"text": "two"}).replace(b"\n", b"\r\n")
    assert run(tmp_path, {"a.jsonl": content}).texts == ["one", "two"]


def test_a_number_too_long_for_python_costs_no_document(tmp_path: Path) -> None:
    assert run(tmp_path, {"a.jsonl": b'{"n": 1' + b"0" * 5000 + b', "text": "kept"}\n'}).texts == ["kept"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "gb18030"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_records_in_other_encodings(tmp_path: Path, encoding: str, kind: str) -> None:
    rows = ["乗ること、云々", CHINESE, "plain, \"quoted\" and 'more'"]
    text = {
        "jsonl": "".join(json.dumps({"text": row}, ensure_ascii=False) + "\n" for row in rows),
        "json": json.dumps([{"text": row} for row in rows], ensure_ascii=False),
        "csv": table(["id", "text"], [["1", row] for row in rows]),
    }[kind]
    declared = encoding if encoding == "gb18030" else None
    assert run(tmp_path, {f"a.{kind}": text.encode(encoding)}, encoding=declared).texts == rows


@pytest.mark.parametrize("key", ["body", "meta.body"])
def test_the_text_key_reaches_into_nested_records(tmp_path: Path, key: str) -> None:
    record = {"text": "wrong", "body": "right"} if key == "body" else {"text": "wrong", "meta": {"body": "right"}}
    files = {"a.jsonl": jsonl(record), "b.json": json.dumps([record, record]).encode()}
    files["c.parquet"] = parquet(pa.Table.from_pylist([record]))
    got = run(tmp_path, files, text_key=key)
    assert (got.texts, got.source["duplicates"], got.quarantine) == (["right"], 3, [])


def test_json_arrays(tmp_path: Path) -> None:
    good = json.dumps([{"id": 1, "text": "one"}, "two", {"text": "three"}], indent=2).encode()
    broken = b'[{"text": "four"}, {"text": "five"}, {"text": '
    got = run(tmp_path, {"a.json": good, "b": broken, "c.json": b"[]"})
    assert got.texts == ["one", "two", "three", "four", "five"]
    assert [(line["file"], line["offset"]) for line in got.quarantine] == [("b", 37)]


def test_one_json_object_is_its_text_or_itself(tmp_path: Path) -> None:
    package = json.dumps({"name": "x", "version": 1}, indent=1)
    inside = json.dumps({"text": "inside", "n": 1}, indent=1)
    got = run(tmp_path, {"a.json": inside.encode(), "b.json": package.encode()})
    assert got.texts == ["inside", package]


def table(header: list[str], rows: list[list[str]], delimiter: str = ",") -> str:
    """Separated values as Python's csv writes them."""
    stream = io.StringIO()
    csv.writer(stream, delimiter=delimiter).writerows([header, *rows])
    return stream.getvalue()


@pytest.mark.parametrize("name", ["a.csv", "without suffix", "a.tsv"])
def test_tables(tmp_path: Path, name: str) -> None:
    rows = [["1", 'quotes "in", commas'], ["2", "two\nlines\n"], ["3", ""], ["4", '5" pipe\ttab'], ["5", CHINESE]]
    content = table(["id", "text"], rows, "\t" if name == "a.tsv" else ",").encode() + b"6,too,many\tof\tthem\n"
    got = run(tmp_path, {name: content})
    assert got.texts == [text for _, text in rows if text]
    assert (got.source["empty"], len(got.quarantine)) == (1, 1)


def test_a_quote_that_is_never_closed_is_told(tmp_path: Path) -> None:
    got = run(tmp_path, {"a.csv": b'id,text\n1,good\n2,"open\n3,swallowed\n'})
    assert got.texts == ["good"]
    assert got.quarantine[0]["bytes"] >= len(b'2,"open\n3,swallowed\n')


def test_prose_is_not_taken_for_a_table_or_json(tmp_path: Path) -> None:
    files = {
        "a.txt": b"text,and,commas begin this poem\nbut nothing else\n",
        "b.md": b"[link](somewhere) and [another]\n",
        "c.txt": b"{curly} beginnings\nare fine\n",
        "d.txt": b'["quoted" he said]\nand left\n',
        "e.py": b"{\n 'a': 1,\n}\n",
        "f.rst": b"<p>is no page</p>\n",
    }
    got = run(tmp_path, files)
    assert got.texts == [content.decode() for content in files.values()]


def test_html_loses_its_tags(tmp_path: Path) -> None:
    page = b"<!DOCTYPE html><html><head><style>p{}</style><script>if (a<b) {}</script></head>"
    page += "<body><p>Fish &amp; chips &#8364;</p><ul><li>one<li>two</ul>文</body></html>".encode()
    got = run(tmp_path, {"page": page})
    assert got.texts[0].split() == ["Fish", "&", "chips", "€", "one", "two", "文"]


# --- columns


def parquet(content: pa.Table, **options: Any) -> bytes:
    """A Parquet file."""
    stream = io.BytesIO()
    pq.write_table(content, stream, **options)
    return stream.getvalue()


def arrow(content: pa.Table, kind: str) -> bytes:
    """An Arrow IPC file or stream, or a Feather file."""
    sink = io.BytesIO()
    if kind == "feather":
        pyarrow.feather.write_feather(content, sink)
        return sink.getvalue()
    with (pa.ipc.new_file if kind == "file" else pa.ipc.new_stream)(sink, content.schema) as writer:
        writer.write_table(content)
    return sink.getvalue()


def columns(kind: pa.DataType | None = None) -> pa.Table:
    """Three rows with a null."""
    return pa.table({"id": [1, 2, 3], "text": pa.array(["one", None, CHINESE]).cast(kind or pa.string())})


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.string_view()], ids=str)
def test_column_types(tmp_path: Path, kind: pa.DataType) -> None:
    content = columns(kind)
    files = {"a": arrow(content, "file"), "b": arrow(content, "stream")}
    if kind != pa.string_view():
        files |= {"c": parquet(content), "d": arrow(content, "feather"), "e": gzip.compress(parquet(content))}
    got = run(tmp_path, files)
    assert (got.texts, got.quarantine) == (["one", CHINESE], [])
    assert (got.source["duplicates"], got.source["empty"]) == (2 * (len(files) - 1), len(files))


def test_dictionary_columns_and_many_row_groups(tmp_path: Path) -> None:
    content = pa.table({"text": pa.array([f"row {number}" for number in range(50)]).dictionary_encode()})
    assert len(run(tmp_path, {"a": parquet(content, row_group_size=7), "b": arrow(content, "file")}).texts) == 50


@pytest.mark.parametrize(
    "content",
    [pa.table({"text": [["a", "list"]]}), pa.table({"text": [1, 2]}), pa.table({"title": ["x"], "body": ["y"]})],
    ids=["nested", "numbers", "absent"],
)
def test_columns_without_text_are_named(tmp_path: Path, content: pa.Table) -> None:
    got = run(tmp_path, {"a.parquet": parquet(content), "b.txt": b"good"})
    assert got.texts == ["good"]
    assert got.quarantine[0]["file"] == "a.parquet"


def test_a_column_that_is_null_in_one_file_only(tmp_path: Path) -> None:
    empty = pa.table({"text": pa.array([None, None], pa.null())})
    got = run(tmp_path, {"a.parquet": parquet(empty), "b.parquet": parquet(columns())})
    assert (got.texts, got.source["empty"], got.quarantine) == (["one", CHINESE], 3, [])


def test_damaged_columns_cost_no_other_file(tmp_path: Path) -> None:
    whole = parquet(columns())
    got = run(tmp_path, {"a": whole[:-30], "b": whole[:20], "c": arrow(columns(), "file")[:-40], "d": b"good"})
    assert got.texts[-1] == "good"
    assert len(got.quarantine) == 3


def test_binary_files_are_set_aside(tmp_path: Path) -> None:
    png = b"\x89PNG\r\n\x1a\n" + bytes(50)
    got = run(tmp_path, {"a.png": png, "b.pdf": b"%PDF-1.7 text", "c": bytes(100), "d": b"ok"})
    assert got.texts == ["ok"]
    assert len(got.quarantine) == 3


# --- documents too large for memory (the limits are lowered, the paths are the same)


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything over 4 kB counts as large."""
    from lmperf.corpus import decoding, merging

    for module in (events, lines, records, tables, texts, window, merging):
        monkeypatch.setattr(module, "LARGE", 4096)
    for module in (decoding, lines, tables, window, merging):
        monkeypatch.setattr(module, "CHUNK", 1000, raising=False)


LONG = "".join(f'{number} "é\U0001f600" \\ 文\n' for number in range(3000))


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "object", "html", "parquet", "csv", "tsv"])
@pytest.mark.usefixtures("small_limits")
def test_large_documents_arrive_whole(tmp_path: Path, kind: str, ascii_only: bool) -> None:
    def dump(value: Any) -> bytes:
        return json.dumps(value, ensure_ascii=ascii_only).encode()

    record = {"n": [1, {"a": None}, 2.5e3], "text": LONG, "z": "after"}
    content = {
        "txt": LONG.encode(),
        "jsonl": dump({"text": "before"}) + b"\n" + dump(record) + b"\n" + dump({"text": "after"}) + b"\n",
        "json": dump([{"text": "before"}, record, {"text": "after"}, LONG + "!"]),
        "object": dump(record).replace(b'{"n"', b'{\n"n"'),
        "html": b"<html><p>" + LONG.encode() + b"</p></html>",
        "parquet": parquet(pa.table({"text": [LONG]})),
        "csv": table(["id", "text", "z"], [["1", "before", ""], ["2", LONG, "z"], ["3", "after", ""]]).encode(),
        "tsv": ("text\tid\nbefore\t1\n" + "x" * 9000 + "\t2\nafter\t3\n").encode(),
    }[kind]
    got = run(tmp_path, {"a.json" if kind == "object" else f"a.{kind}": content})
    extra = {"jsonl": ["before", LONG, "after"], "json": ["before", LONG, "after", LONG + "!"]}
    extra |= {"csv": extra["jsonl"], "tsv": ["before", "x" * 9000, "after"]}
    expected = extra.get(kind, [LONG])
    assert [text.strip() for text in got.texts] == [text.strip() for text in expected]
    assert got.quarantine == []


@pytest.mark.usefixtures("small_limits")
def test_large_documents_in_other_encodings_and_broken_ones(tmp_path: Path) -> None:
    chinese = CHINESE * 300
    files = {
        "a.txt": chinese.encode("gb18030"),
        "b.jsonl": json.dumps({"text": chinese + "b"}, ensure_ascii=False).encode("gb18030"),
        "c.txt": LONG.encode() + b"\xff\xff\xff",
        "d.jsonl": json.dumps({"text": LONG}).encode()[:-9] + b'\n{"text": "kept"}\n',
        "e.jsonl": json.dumps({"text": LONG + "e"}).encode() + b'{"text": "two on a line"}\n',
        "g.csv": table(["id", "text"], [["1", chinese + "g"], ["2", "end"]]).encode("gb18030"),
        "h.csv": b'id,text\n1,"' + b"never closed\n" * 2000,
        "f.txt": gzip.compress(LONG.encode())[:-9],
    }
    got = run(tmp_path, files, encoding="gb18030")
    assert got.texts == [chinese, chinese + "b", "kept", chinese + "g", "end"]
    assert sorted({line["file"] for line in got.quarantine}) == ["c.txt", "d.jsonl", "e.jsonl", "f.txt", "h.csv"]


@pytest.mark.usefixtures("small_limits")
def test_large_duplicates_are_found_and_large_markup_may_be_small(tmp_path: Path) -> None:
    page = b"<html><p>short" + b"<br class='x'>" * 2000 + b"</p></html>"
    got = run(tmp_path, {"a.txt": LONG.encode(), "b.txt": LONG.encode(), "c.html": page})
    assert [text.strip() for text in got.texts] == [LONG.strip(), "short"]
    assert got.source["duplicates"] == 1


def test_five_megabytes_on_one_line(tmp_path: Path) -> None:
    line = "word " * 1_000_000
    assert run(tmp_path, {"a.txt": line.encode(), "b.jsonl": json.dumps({"text": line + "b"}).encode()}).texts == [
        line,
        line + "b",
    ]


# --- any bytes, any format

SUFFIXES = [".txt", ".md", ".jsonl", ".json", ".csv", ".tsv", ".html", ".parquet", ".arrow", ".gz", ""]
STARTS = [b"", b"[", b"{", b'{"text": "', b"text,id\n", b"<html>", b"\x1f\x8b\x08", b"PAR1", b"ARROW1\0\0"]
STARTS += [
    b"BZh",
    b"\x28\xb5\x2f\xfd",
    b"\xfd7zXZ\0",
    b"\xff\xff\xff\xff\x10\0\0\0",
    b'[{"text": "a"}, ',
    b"<![if",
    b"<![",
]
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read_all(
    folder: Path, name: str, content: bytes, notes: events.Notes | None = None, encoding: str | None = None
) -> tuple[list[bytes], int]:
    """Documents and number of problems of one file, without shards."""
    documents, problems = [], 0
    source = events.Input(b"unused", name.encode(), folder, content, encoding)
    for event in reading.read_documents(source, notes or events.Notes()):
        if isinstance(event, events.Text):
            documents.append(event.data)
        else:
            problems += 1
    return documents, problems


@FUZZ
@given(start=st.sampled_from(STARTS), rest=st.binary(max_size=300), suffix=st.sampled_from(SUFFIXES))
def test_any_bytes_are_read_or_set_aside(tmp_path: Path, start: bytes, rest: bytes, suffix: str) -> None:
    notes = events.Notes()
    documents, problems = read_all(tmp_path, "x" + suffix, start + rest, notes)
    for document in documents:
        document.decode()
    if next(iter(notes.formats)).startswith("text"):
        assert len(documents) + problems == 1
    if any(kind in ("json", "parquet", "arrow", "stream") for kind in notes.formats):
        assert problems + len(documents) + notes.empty


def valid_files() -> list[bytes]:
    """One small valid file of each format, plain and packed."""
    rows = ["one", CHINESE, None]
    content = pa.table({"id": [1, 2, 3], "text": rows})
    files = [parquet(content), *(arrow(content, kind) for kind in ("file", "stream", "feather"))]
    files += [jsonl(*({"text": row} for row in rows)), json.dumps([{"text": row} for row in rows]).encode()]
    files += [table(["id", "text"], [["1", 'a "quote"']]).encode(), CHINESE.encode("utf-16"), b"<html><p>a<b>c&amp;"]
    return files + [pack(data) for data in files[:2] + files[4:6] for pack in PACKERS.values()]


VALID = valid_files()


@FUZZ
@given(
    content=st.sampled_from(VALID),
    edits=st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=4), st.integers(0, 4)), min_size=1, max_size=4),
    encoding=st.sampled_from([None, "gb18030", "utf-16", "cp1252"]),
)
def test_a_damaged_file_of_any_format_crashes_nothing(
    tmp_path: Path, content: bytes, edits: list[tuple[float, bytes, int]], encoding: str | None
) -> None:
    for place, inserted, deleted in edits:
        at = int(place * len(content))
        content = content[:at] + inserted + content[at + deleted :]
    documents, _ = read_all(tmp_path, "x", content, encoding=encoding)
    for document in documents:
        document.decode()


@FUZZ
@given(
    texts_=st.lists(st.text(st.characters(exclude_categories=("Cs",)), min_size=1), min_size=1, max_size=6),
    junk=st.binary(max_size=40).filter(lambda data: b"\n" not in data),
    kind=st.sampled_from(["jsonl", "json", "csv", "parquet", "arrow"]),
    pack=st.sampled_from([None, *PACKERS]),
)
def test_no_valid_document_is_lost_or_changed(
    tmp_path: Path, texts_: list[str], junk: bytes, kind: str, pack: str | None
) -> None:
    content = {
        "jsonl": lambda: (
            jsonl(*({"text": text} for text in texts_[:1]))
            + junk
            + b"\n"
            + jsonl(*({"text": text} for text in texts_[1:]))
        ),
        "json": lambda: json.dumps([{"text": text} for text in texts_]).encode() + junk,
        "csv": lambda: table(["id", "text"], [["1", text] for text in texts_]).encode(),
        "parquet": lambda: parquet(pa.table({"text": texts_})),
        "arrow": lambda: arrow(pa.table({"text": texts_}), "stream"),
    }[kind]()
    documents, _ = read_all(tmp_path, f"x.{kind}", PACKERS[pack](content) if pack else content)
    expected = [text.encode() for text in texts_]
    missing = [document for document in expected if document not in documents]
    assert not missing


@FUZZ
@given(text=st.text(st.characters(exclude_categories=("Cs",))), pack=st.sampled_from([None, *PACKERS]))
def test_plain_text_is_never_changed(tmp_path: Path, text: str, pack: str | None) -> None:
    content = ("A start that is no other format. " + text).encode()
    documents, problems = read_all(tmp_path, "x.txt", PACKERS[pack](content) if pack else content)
    nuls = content.count(b"\0") * 10 > len(content)
    assert (documents, problems) == (([], 1) if nuls else ([content], 0))
