"""Reading token shards: what is mapped, in which order it is read, and that damage is found."""

from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from corpus_helpers import prose, write_shards
from hypothesis import given, settings
from hypothesis import strategies as st

from lmperf.corpus import accelerator, token_shards
from lmperf.corpus.datasets import Order, TokenData, batches
from lmperf.corpus.tokenizer import tokenize
from lmperf.records import InputError


def make(folder: Path) -> Path:
    shards = write_shards(folder / "shards", {"english": [prose(number) for number in range(200)]})
    tokenize(shards, folder / "tokens", vocab_size=400, block=33)
    return folder / "tokens"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def cut_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tokens in shards of about 2,000 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_shards, "SHARD_BYTES", 4000)
        patch.setattr(accelerator, "BATCH_BYTES", dict.fromkeys(accelerator.BATCH_BYTES, 3000))
        return make(tmp_path_factory.mktemp("many"))


def test_one_shard_is_one_array_without_a_copy(tokens: Path) -> None:
    data = TokenData.open(tokens, "train", verify=True)
    assert isinstance(data.tokens, np.ndarray)
    assert data.tokens.shape == (len(data),)
    assert data.tokens.dtype == np.uint16
    assert not data.tokens.flags.owndata
    assert not data.tokens.flags.writeable
    assert is_mapped(tokens / "train-00000.arrow", data.tokens.ctypes.data)


def is_mapped(path: Path, address: int) -> bool:
    """Whether `address` lies in a mapping of the file `path` in this process."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
    ranges = [[int(number, 16) for number in line[0].split("-")] for line in lines]
    return any(first <= address < last for first, last in ranges)


def test_many_shards_read_like_one(tokens: Path, cut_tokens: Path) -> None:
    whole, cut = TokenData.open(tokens, "train"), TokenData.open(cut_tokens, "train", verify=True)
    assert len(cut.tokens) > 3
    assert np.array_equal(np.concatenate(list(cut.tokens)), whole.tokens)
    assert len(whole) == len(cut)
    assert whole.bytes_per_token == cut.bytes_per_token > 1


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_windows_across_shards(tokens: Path, cut_tokens: Path, data: st.DataObject) -> None:
    whole, cut = TokenData.open(tokens, "train"), TokenData.open(cut_tokens, "train")
    length = data.draw(st.integers(1, 7000))
    starts = np.array(data.draw(st.lists(st.integers(0, len(whole) - length), max_size=4)), dtype=np.int64)
    expected = [whole.tokens[start : start + length] for start in starts]
    for source in (whole, cut):
        found = source.read_batch(starts, length)
        assert found.dtype == np.int64
        assert found.shape == (len(starts), length)
        assert all(np.array_equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("start", [-1, 10**9, "last"])
def test_a_window_outside_is_an_error(tokens: Path, cut_tokens: Path, start: int | str) -> None:
    for data in (TokenData.open(tokens, "test"), TokenData.open(cut_tokens, "test")):
        first = len(data) - 9 if start == "last" else start
        with pytest.raises(IndexError, match="outside"):
            data.read_batch(np.array([0, first]), 10)
        assert data.read_batch(np.array([len(data) - 10]), 10).shape == (1, 10)


def child_sum(data: TokenData, queue: multiprocessing.Queue[int]) -> None:
    queue.put(int(data.read_batch(np.array([0]), len(data)).sum()))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_another_process_reads_the_same(tokens: Path, cut_tokens: Path, method: str) -> None:
    context = multiprocessing.get_context(method)
    data = TokenData.open(cut_tokens, "validation")
    expected = int(sum(part.astype(np.int64).sum() for part in data.tokens))
    queue = context.Queue()
    process = context.Process(target=child_sum, args=(data, queue))
    process.start()
    assert queue.get(timeout=60) == expected
    process.join()


def test_a_pickle_holds_no_tokens(tokens: Path) -> None:
    data = TokenData.open(tokens, "train")
    assert data.tokens.sum() > 0
    packed = pickle.dumps(data)
    assert len(packed) < 2000
    assert np.array_equal(pickle.loads(packed).tokens, data.tokens)  # noqa: S301 - made on the line above


def test_unknown_split_and_missing_folder(tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no split 'trian'; it has test, train, validation"):
        TokenData.open(tokens, "trian")
    with pytest.raises(InputError, match="no such file"):
        TokenData.open(tmp_path, "train")


def test_a_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    folder = make(tmp_path)
    path = folder / "train-00000.arrow"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"train-00000\.arrow: damaged"):
        TokenData.open(folder, "train", verify=True)
    assert len(TokenData.open(folder, "validation", verify=True))


def test_truncated_missing_and_foreign_shards_are_named(tmp_path: Path, cut_tokens: Path) -> None:
    folder = make(tmp_path)
    path = folder / "train-00000.arrow"
    content = path.read_bytes()
    for wrong in (content[: len(content) // 2], b"", (cut_tokens / "train-00000.arrow").read_bytes(), None):
        path.unlink() if wrong is None else path.write_bytes(wrong)
        with pytest.raises(InputError, match=r"train-00000\.arrow"):
            TokenData.open(folder, "train").read_batch(np.array([0]), 5)


ORDERS = st.builds(Order, st.integers(40, 400), st.integers(1, 39), st.integers(1, 30), st.integers(-5, 2**40))


@given(ORDERS)
@settings(max_examples=150, deadline=None)
def test_every_window_is_read_once_an_epoch(order: Order) -> None:
    steps = -(-3 * order.windows // order.batch_size)
    starts = np.concatenate([order.batch(step) for step in range(steps)])
    whole = np.arange(order.windows) * order.length
    for epoch in range(3):
        part = starts[epoch * order.windows : (epoch + 1) * order.windows]
        assert np.array_equal(np.sort(part), whole)
    assert starts.max() + order.length + 1 <= order.tokens


@given(ORDERS, st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_any_step_is_reached_directly(order: Order, step: int) -> None:
    twin = Order(order.tokens, order.length, order.batch_size, order.seed)
    assert np.array_equal(order.batch(step), twin.batch(step))
    assert order.batch(step).dtype == np.int64
    assert order.batch(step).shape == (order.batch_size,)


def test_epochs_and_seeds_differ_and_the_order_is_fixed_for_ever() -> None:
    first, second = Order(1001, 10, 100, seed=1), Order(1001, 10, 100, seed=2)
    orders = {tuple(order.batch(step)) for order in (first, second) for step in (0, 1)}
    assert len(orders) == 4
    # written down once: a new version of numpy must not change what a seed means
    assert Order(101, 10, 5, seed=1234).batch(0).tolist() == FIXED_ORDER
    assert Order(101, 10, 5, seed=1, shuffle=False).batch(1).tolist() == [50, 60, 70, 80, 90]


FIXED_ORDER = [20, 50, 70, 90, 80]


@pytest.mark.parametrize(("tokens_", "message"), [(10, "1 fewer"), (0, "11 fewer")])
def test_too_few_tokens_for_a_window(tokens_: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Order(tokens_, 10, 2, seed=1)
    with pytest.raises(ValueError, match="batch_size"):
        Order(100, 10, 0, seed=1)
    with pytest.raises(IndexError, match="step -1"):
        Order(100, 10, 1, seed=1).batch(-1)


def test_batches_are_shifted_contiguous_and_resumable(tokens: Path, cut_tokens: Path) -> None:
    import torch

    found = []
    for folder in (tokens, cut_tokens):
        data = TokenData.open(folder, "train")
        order = Order(len(data), 32, 4, seed=3)
        run = list(islice(batches(data, order), 12))
        for (x, y), starts in zip(run, (order.batch(step) for step in range(12)), strict=True):
            assert x.dtype == y.dtype == torch.int64
            assert x.shape == y.shape == (4, 32)
            assert x.is_contiguous()
            assert y.is_contiguous()
            assert np.array_equal(x.numpy(), data.read_batch(starts, 32))
            assert np.array_equal(y.numpy(), data.read_batch(starts + 1, 32))
        resumed = next(batches(data, order, start=7))
        assert all(torch.equal(*pair) for pair in zip(resumed, run[7], strict=True))
        found.append(torch.stack([x for x, _ in run]))
    assert torch.equal(*found)


def test_batches_do_not_share_memory(tokens: Path) -> None:
    data = TokenData.open(tokens, "train")
    stream = batches(data, Order(len(data), 32, 4, seed=3))
    (x, _), (x2, _) = next(stream), next(stream)
    kept = x.clone()
    x2.zero_()
    assert (x == kept).all()


def test_no_torch_is_loaded_before_the_first_batch() -> None:
    code = "import sys, lmperf.corpus.datasets, lmperf.corpus.tokenizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1]).returncode == 0
