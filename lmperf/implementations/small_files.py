"""The state before merging: thousands of small text files, opened and tokenised whenever a batch needs them."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from lmperf.corpus.datasets import TokenData
from lmperf.corpus.tokenizer import load_tokenizer
from lmperf.implementations.derived import derived, split_key
from lmperf.reference import LoaderSource

FILE_TOKENS = 1024  # a longer document is cut, before white space, so that every file is small
FILES_PER_FOLDER = 1000


def prepare(source: LoaderSource) -> Path:
    """Write the split's documents as text files and `index.npy` (first token of each file); returns the folder.

    The files tokenise to exactly the split's tokens: this is checked for every file when it is written.
    """
    folder = derived(source) / f"files-{split_key(source)}"
    if (folder / "index.npy").is_file():
        return folder
    making = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        _write(source, making)
        making.chmod(0o755)  # mkdtemp lets nobody else in
        os.rename(making, folder)
    except OSError:
        if not (folder / "index.npy").is_file():  # another process may have been quicker
            raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return folder


def _write(source: LoaderSource, folder: Path) -> None:
    data = TokenData.open(source.tokens, source.split)
    tokenizer = load_tokenizer(source.tokens / "tokenizer.json")
    tokens = data.tokens if isinstance(data.tokens, np.ndarray) else np.concatenate(list(data.tokens))
    spaces = starts_with_space(tokenizer)
    firsts: list[int] = []
    start = 0
    for end in document_ends(tokens, data.end_of_text):
        for first, text in _parts(tokens[start:end], tokenizer, spaces):
            _write_file(folder, len(firsts), text)
            firsts.append(start + first)
        start = end + 1
    # A file's tokens end with the end-of-text id where the next file starts one token later than its text does.
    np.save(folder / "index.npy", np.array([*firsts, len(tokens)], dtype=np.int64))


def document_ends(tokens: np.ndarray, end_of_text: int) -> list[int]:
    """Where each document's end-of-text id lies, or the end of the tokens for a last document without one."""
    ends: list[int] = np.flatnonzero(tokens == end_of_text).tolist()
    return ends if ends and ends[-1] == len(tokens) - 1 else [*ends, len(tokens)]


def file_path(folder: Path, number: int) -> Path:
    """Where text file `number` lies: at most `FILES_PER_FOLDER` in one folder."""
    return folder / f"{number // FILES_PER_FOLDER:05d}" / f"{number:07d}.txt"


def _write_file(folder: Path, number: int, text: str) -> None:
    path = file_path(folder, number)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text.encode())


def starts_with_space(tokenizer: Tokenizer) -> np.ndarray:
    """For every id whether its text starts with white space: (vocab,) bool."""
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    texts = tokenizer.decode_batch([[token] for token in range(size)], skip_special_tokens=False)
    return np.array([text[:1].isspace() for text in texts])


def _parts(document: np.ndarray, tokenizer: Tokenizer, spaces: np.ndarray) -> list[tuple[int, str]]:
    """(first token, text) of each file of one document, cut where tokenising the parts gives the same tokens."""
    for firsts in (_cuts(spaces[document]), [0]):  # a tokenizer that looks across white space: one file a document
        ends = [*firsts[1:], len(document)]
        parts = [document[start:stop].tolist() for start, stop in zip(firsts, ends, strict=True)]
        texts = tokenizer.decode_batch(parts, skip_special_tokens=False)
        if [found.ids for found in tokenizer.encode_batch_fast(texts, add_special_tokens=False)] == parts:
            return list(zip(firsts, texts, strict=True))
    raise NotImplementedError("small_files: this tokenizer does not give the same tokens for its own decoded text")


def _cuts(spaces: np.ndarray) -> list[int]:
    """The first token of each file: before white space, at least `FILE_TOKENS` apart."""
    cuts = [0]
    for token in np.flatnonzero(spaces).tolist():
        if token - cuts[-1] >= FILE_TOKENS:
            cuts.append(token)
    return cuts


class FileStore:
    """Windows of tokens out of the text files of `prepare`; the tokenizer loads in the process that reads."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.folder, self._tokenizer_path = folder, tokenizer
        self.index = np.load(folder / "index.npy")
        self._tokenizer: Tokenizer | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokenizer": None}

    def file_tokens(self, number: int) -> list[int]:
        """The tokens of file `number`, with the end-of-text id when the document ends there."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._tokenizer_path)
            self._end = _end_of_text(self._tokenizer_path.parent)
        text = file_path(self.folder, number).read_bytes().decode()
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        size = int(self.index[number + 1] - self.index[number])
        if len(ids) < size:
            ids.append(self._end)
        if len(ids) != size:
            raise ValueError(f"{file_path(self.folder, number)}: {len(ids)} tokens, the index says {size}")
        return ids

    def windows(self, indices: np.ndarray, length: int) -> np.ndarray:
        """See `loaders.Store.windows`: opens and tokenises every file that a window touches."""
        out = np.empty((len(indices), length), dtype=np.int64)
        for row, start in enumerate(indices.tolist()):
            out[row] = self._window(start, length)
        return out

    def _window(self, start: int, length: int) -> list[int]:
        number = int(np.searchsorted(self.index, start, side="right")) - 1
        skip = start - int(self.index[number])
        found: list[int] = []
        while len(found) < skip + length:
            found += self.file_tokens(number)
            number += 1
        return found[skip : skip + length]


def _end_of_text(tokens: Path) -> int:
    from lmperf.records import read_json

    return int(read_json(tokens / "manifest.json")["end_of_text"])
