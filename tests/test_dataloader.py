"""Every loader gives the baseline's batches, in its order, wherever it starts; files stay small; padding is honest."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from corpus_helpers import prose, write_shards

from lmperf import reference, registry
from lmperf.catalogue import catalogue
from lmperf.corpus.datasets import TokenData
from lmperf.corpus.tokenizer import tokenize
from lmperf.implementations import small_files
from lmperf.implementations.loaders import NO_TARGET, Loader, PaddedSteps, all_tokens, document_rows
from lmperf.records import ArmSpec, Cell, InputError, ModelShape, SessionSpec
from lmperf.reference import LoaderSource
from lmperf.workloads.base import Setting, Unsupported, get_workload
from lmperf.workloads.loading import check_loader, open_feed

NAMES = (
    "arrow_mmap", "small_files", "memmap_bin", "in_memory", "workers_1", "workers_2", "workers_4", "prefetch_2",
    "prefetch_8", "pin_memory", "persistent_workers", "padded", "shuffle_blocks",
)  # fmt: skip
RUNNABLE = tuple(name for name in NAMES if name not in ("pin_memory", "padded"))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loader")
    texts = [prose(number, words=40 + 37 * (number % 5)) for number in range(60)]
    texts += [prose(500, words=4000), "é 文字\n" * 700, "x", " \n "]  # long, not ASCII, tiny, blank
    write_shards(folder / "shards", {"english": texts})
    tokenize(folder / "shards", folder / "tokens", vocab_size=300, block=33, accelerator="none", held_out=0.1)
    return folder / "tokens"


@pytest.fixture
def source(tokens: Path, tmp_path: Path) -> LoaderSource:
    return LoaderSource(tokens=tokens, split="train", batch_size=3, length=32, seed=7, scratch=tmp_path)


def setting_of(tokens: Path, scratch: Path, name: str, workload: str, **params: object) -> Setting:
    arm = ArmSpec(name, () if name == "baseline" else (f"dataloader/{name}",))
    spec = SessionSpec(
        session="dataloader", axis="dataloader", workload=workload, arms=(arm,), cells=(), batch_size=3,
        sequence_length=32, rounds=3, seed=1, device="cpu", data=str(tokens),
        model=ModelShape(vocab_size=300, context_length=32, layers=1, heads=2, kv_heads=2, d_model=16, d_ff=32),
    )  # fmt: skip
    return Setting(spec, arm, Cell("cell", params), registry.compose(arm.variants), seed=11, scratch=scratch)


def take(loader: object, source: LoaderSource, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(itertools.islice(loader(source), count))  # type: ignore[operator]


def same(first: list[tuple[torch.Tensor, torch.Tensor]], second: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in pairs)


def test_every_name_of_the_catalogue_is_registered() -> None:
    assert set(NAMES) <= {entry.name for entry in catalogue().values() if entry.axis == "dataloader"}


@pytest.mark.parametrize("name", RUNNABLE)
def test_same_batches_in_the_same_order(name: str, source: LoaderSource) -> None:
    loader = registry.compose([f"dataloader/{name}"]).loader
    assert same(take(loader, source, 6), take(reference.arrow_loader, source, 6))


@pytest.mark.parametrize("name", RUNNABLE)
def test_resuming_near_the_end_of_an_epoch(name: str, source: LoaderSource) -> None:
    data = TokenData.open(source.tokens, source.split)
    epoch = (len(data) - 1) // source.length // source.batch_size
    late = replace(source, start=epoch - 2)  # the next epoch begins within these batches
    loader = registry.compose([f"dataloader/{name}"]).loader
    assert same(take(loader, late, 5), take(reference.arrow_loader, source, epoch + 3)[epoch - 2 :])


def test_another_seed_gives_another_order(source: LoaderSource) -> None:
    loader = registry.compose(["dataloader/workers_2"]).loader
    assert not same(take(loader, source, 3), take(loader, replace(source, seed=8), 3))


def test_variants_of_the_axis_combine(source: LoaderSource) -> None:
    recipe = registry.compose(["dataloader/small_files", "dataloader/workers_4"])
    assert recipe.loader == Loader(store="small_files", workers=4)
    assert same(take(recipe.loader, source, 4), take(reference.arrow_loader, source, 4))


def test_small_files_are_small_and_tokenise_to_the_split(source: LoaderSource) -> None:
    folder = small_files.prepare(source)
    store = small_files.FileStore(folder, source.tokens / "tokenizer.json")
    files = len(store.index) - 1
    data = TokenData.open(source.tokens, source.split)
    joined = np.concatenate([store.file_tokens(number) for number in range(files)])
    assert np.array_equal(joined, all_tokens(data))
    assert max(np.diff(store.index)) < 2 * small_files.FILE_TOKENS
    assert files > int((all_tokens(data) == data.end_of_text).sum())  # the long document gave several
    assert small_files.prepare(source) == folder


def test_a_changed_text_file_is_noticed(source: LoaderSource, tmp_path: Path) -> None:
    store = small_files.FileStore(small_files.prepare(source), source.tokens / "tokenizer.json")
    store.folder = tmp_path
    (tmp_path / "00000").mkdir()
    small_files.file_path(tmp_path, 0).write_text("something else")
    with pytest.raises(ValueError, match="the index says"):
        store.file_tokens(0)


def test_padded_rows_hold_every_target_once(source: LoaderSource) -> None:
    data = TokenData.open(source.tokens, source.split)
    tokens = all_tokens(data)
    starts, sizes = document_rows(tokens, data.end_of_text, source.length)
    targets = np.concatenate([np.arange(a + 1, a + n) for a, n in zip(starts, sizes, strict=True)])
    assert len(set(targets.tolist())) == len(targets)
    firsts = 1 + int((tokens[:-1] == data.end_of_text).sum())  # no document's first token is a target
    assert len(targets) == len(tokens) - firsts
    x, y = PaddedSteps(source)[0]
    assert x.shape == y.shape == (3, 32)
    assert bool((y[y != NO_TARGET] >= 0).all())


def test_padded_loss_leaves_padding_out(source: LoaderSource) -> None:
    x, y = PaddedSteps(source)[0]
    hidden, head = torch.randn(*x.shape, 8), torch.randn(300, 8)
    real = y != NO_TARGET
    expected = reference.cross_entropy(hidden[real], head, y[real])
    torch.testing.assert_close(reference.cross_entropy(hidden, head, y), expected)


def test_a_loader_with_other_batches_fails_its_check(source: LoaderSource) -> None:
    recipe = registry.Recipe().replace(loader=lambda s: reference.arrow_loader(replace(s, seed=s.seed + 1)))
    assert not check_loader(recipe, source).passed
    one_late = registry.Recipe().replace(loader=lambda s: reference.arrow_loader(replace(s, start=s.start + 1)))
    assert not check_loader(one_late, source).passed


@pytest.mark.parametrize("name", ["baseline", "small_files", "workers_2", "padded"])
def test_loading_workload(name: str, tokens: Path, tmp_path: Path) -> None:
    prepared = get_workload("loading")(setting_of(tokens, tmp_path, name, "loading"))
    try:
        x, y = prepared.step()
        assert x.shape == y.shape == (3, 32)
        assert prepared.tokens_per_step == 96 * prepared.once["useful_token_share"][1]
        assert prepared.once["worker_start_s"][1] > 0
        assert ("worker_pss_bytes" in prepared.once) == (name == "workers_2")
        assert (prepared.once["useful_token_share"][1] < 1) == (name == "padded")
        assert prepared.check is not None
        assert prepared.check(5).passed
    finally:
        prepared.close()


@pytest.mark.parametrize("name", ["baseline", "memmap_bin", "workers_1"])
def test_a_cold_cache_changes_no_batch(name: str, tokens: Path, tmp_path: Path) -> None:
    setting = setting_of(tokens, tmp_path, name, "loading", cache="cold")
    feed = open_feed(setting)
    true = reference.arrow_loader(replace(feed.source, start=feed.given))
    for _ in range(3):
        feed.make_cold()
        if name == "workers_1":  # starting the worker took one batch
            next(true)
        assert same([feed.next()], [next(true)])
    feed.close()


def test_the_first_batch_after_dropping_is_timed(tokens: Path, tmp_path: Path) -> None:
    prepared = get_workload("loading")(setting_of(tokens, tmp_path, "baseline", "loading", cache="cold"))
    for _ in range(2):
        prepared.before_block()
        prepared.step()
        prepared.step()
    assert len(prepared.observations.values["cold_batch_s"]) == 2
    prepared.close()


def test_wait_share_with_an_emulated_and_with_the_real_model(tokens: Path, tmp_path: Path) -> None:
    workload = get_workload("loading_in_step")
    slow = workload(setting_of(tokens, tmp_path, "small_files", "loading_in_step", emulated_step_s=0.0))
    for prepared in (slow, workload(setting_of(tokens, tmp_path, "baseline", "loading_in_step"))):
        prepared.step()
        shares = prepared.observations.values["wait_share"]
        assert len(shares) == 1
        assert 0 <= shares[0] <= 1
        prepared.close()
    assert slow.observations.values["wait_share"][0] > 0.5  # nothing but waiting is left


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_pinning_without_a_device_is_unsupported(tokens: Path, tmp_path: Path) -> None:
    assert registry.get("dataloader/pin_memory").unavailable() == "no CUDA device"
    with pytest.raises(Unsupported, match="pin_memory needs a CUDA device"):
        get_workload("loading")(setting_of(tokens, tmp_path, "pin_memory", "loading"))


def test_bad_cells_are_named(tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cache: 'hot'"):
        get_workload("loading")(setting_of(tokens, tmp_path, "baseline", "loading", cache="hot"))
    setting = setting_of(tokens, tmp_path, "baseline", "loading")
    with pytest.raises(InputError, match="data"):
        get_workload("loading")(replace(setting, spec=replace(setting.spec, data=None)))
