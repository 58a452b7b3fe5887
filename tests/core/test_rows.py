from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_lazy_grammar.core import rows
from vllm_lazy_grammar.core.rows import IdSet, RowCache, RowSlot
from vllm_lazy_grammar.core.vocabulary import Vocabulary

MODEST = settings(derandomize=True, deadline=None, max_examples=60)
SIZES = st.integers(1, 100)
INF = np.float32("-inf")


@st.composite
def rows_and_sizes(draw):
    size = draw(SIZES)
    words = draw(
        st.lists(st.sampled_from([0, -1, 5, -8, 1 << 31, 1 << 30]), min_size=-(-size // 32), max_size=-(-size // 32))
    )
    return np.array(words, np.int64).astype(np.int32), size


def allowed(row, size):
    return [token for token in range(size) if int(row[token // 32]) >> token % 32 & 1]


def test_a_row_that_masks_nothing_is_minus_one_throughout():
    assert rows.ones(3).tolist() == [-1, -1, -1]
    assert not rows.masks_anything(rows.ones(3))


@pytest.mark.parametrize("token", [0, 31, 32, 64])
def test_one_masked_id_is_something_masked(token):
    row = rows.ones(3)
    IdSet([token], 65).mask(row)
    assert rows.masks_anything(row)


@MODEST
@given(st.sets(st.integers(-3, 120)), SIZES)
def test_a_row_of_ids_allows_exactly_those_that_exist(ids, size):
    row = rows.row_of(ids, size)
    assert len(row) == -(-size // 32)
    assert (
        rows.allowed_ids(row, size).tolist()
        == sorted(token for token in ids if 0 <= token < size)
        == allowed(row, size)
    )


def test_a_stop_row_allows_the_stop_ids_and_nothing_else():
    assert rows.stop_row([33, 2, 900], 40).tolist() == [4, 2]


@MODEST
@given(rows_and_sizes(), st.sets(st.integers(0, 99)))
def test_ids_are_masked_and_allowed_in_place_and_no_other_bit_moves(given_row, ids):
    row, size = given_row
    ids = {token for token in ids if token < size}
    masked, opened = row.copy(), row.copy()
    IdSet(ids, size).mask(masked)
    IdSet(ids, size).allow(opened)
    assert allowed(masked, size) == [token for token in allowed(row, size) if token not in ids]
    assert allowed(opened, size) == sorted({*allowed(row, size), *ids})


@pytest.mark.parametrize("count", [1, 8, 9, 300])
def test_many_ids_cost_one_pass_and_mean_the_same(count):
    ids = [token * 32 for token in range(count)]
    row = rows.ones(count)
    IdSet(ids, count * 32).mask(row)
    assert row.tolist() == [-2] * count
    IdSet(ids, count * 32).allow(row)
    assert row.tolist() == [-1] * count


def test_a_row_that_masks_anything_masks_padding():
    vocabulary = Vocabulary([b"a", b"", b"b", b"<s>"], 40, special_ids=[3], added={"<s>": 3})
    assert rows.open_row(vocabulary).tolist() == [0b1101, 0]


@MODEST
@given(rows_and_sizes())
def test_reading_a_row_agrees_with_its_bits(given_row):
    row, size = given_row
    ids = allowed(row, size)
    assert rows.allowed_ids(row, size).tolist() == ids
    assert sorted({*ids, *rows.masked_ids(row, size).tolist()}) == list(range(size))
    assert rows.count_allowed(row, size) == len(ids) == size - len(rows.masked_ids(row, size))
    assert rows.only_allowed(row, size) == (ids[0] if len(ids) == 1 else None)
    assert [token for token in range(-1, size + 40) if rows.is_allowed(row, token, size)] == ids


@pytest.mark.parametrize("token", [0, 31, 32, 39])
def test_the_single_allowed_id_is_found(token):
    assert rows.only_allowed(rows.row_of([token], 40), 40) == token


def test_applying_fills_words_that_are_all_zeros():
    logits = np.arange(64, dtype=np.float32)
    rows.apply_row(logits, np.array([0, -1], np.int32), 64)
    assert logits.tolist() == [INF] * 32 + list(range(32, 64))


def test_applying_skips_words_that_are_all_ones():
    logits = np.full(32, np.nan, np.float32)
    rows.apply_row(logits, rows.ones(1), 32)
    assert np.isnan(logits).all()


@MODEST
@given(rows_and_sizes(), st.integers(0, 130))
def test_applying_leaves_allowed_values_and_entries_beyond_the_vocabulary_as_they_are(given_row, length):
    row, size = given_row
    logits = np.arange(length, dtype=np.float32)
    rows.apply_row(logits, row, size)
    ids = allowed(row, size)
    assert logits.tolist() == [INF if token < size and token not in ids else token for token in range(length)]


def test_warming_compiles_everything_so_that_no_later_call_does():
    rows.warm()
    compiled = [rows._apply, rows._count, rows._masks, rows._only]
    before = [len(function.signatures) for function in compiled]
    for frozen in (False, True):
        row = rows.row_of([1, 50], 90)
        row.setflags(write=not frozen)
        rows.apply_row(np.zeros(90, np.float32), row, 90)
        rows.count_allowed(row, 90)
        rows.only_allowed(row, 90)
        rows.masks_anything(row)
    assert [len(function.signatures) for function in compiled] == before


def test_a_slot_knows_no_row_until_one_is_kept():
    out = np.array([7], np.int32)
    assert RowSlot().copy_to(out) is None
    assert out.tolist() == [7]


def test_a_slot_copies_the_row_of_the_position():
    slot, row, out = RowSlot(), np.array([5, 6], np.int32), rows.zeros(2)
    slot.keep(row, masks=True)
    row[0] = 9
    assert slot.copy_to(out) is True
    out[1] = 1
    assert slot.copy_to(out) is True
    assert out.tolist() == [5, 6]


def test_a_slot_forgets_when_the_position_moves():
    slot, out = RowSlot(), rows.zeros(1)
    slot.keep(np.array([5], np.int32), masks=True)
    slot.drop()
    assert slot.copy_to(out) is None


def test_a_slot_whose_position_masks_nothing_answers_minus_one_throughout():
    slot, out = RowSlot(), rows.zeros(2)
    slot.keep(np.array([5, 5], np.int32), masks=True)
    slot.drop()
    slot.keep(rows.ones(2), masks=False)
    assert slot.copy_to(out) is False
    assert out.tolist() == [-1, -1]


def test_a_cached_row_is_copied_and_nobodys_change_reaches_it():
    cache, row, out = RowCache(10_000), np.array([5, 6], np.int32), rows.zeros(2)
    cache.put("key", row)
    row[0] = 0
    for _ in range(2):
        assert cache.get("key", out)
        assert out.tolist() == [5, 6]
        out[1] = 0


def test_a_key_that_is_not_there_writes_nothing():
    out = np.array([7], np.int32)
    assert not RowCache(10_000).get("key", out)
    assert out.tolist() == [7]


def test_a_row_that_masks_nothing_is_cached_without_its_words():
    cache, out = RowCache(10_000), rows.zeros(1000)
    cache.put("key", rows.ones(1000))
    assert cache.nbytes < 1000
    assert cache.get("key", out)
    assert not rows.masks_anything(out)


def test_the_least_recently_used_row_goes_first():
    row = rows.zeros(1000)
    cache = RowCache(3 * (row.nbytes + 600))
    for key in "abc":
        cache.put(key, row)
    cache.get("a", row)
    cache.put("d", row)
    assert [cache.get(key, row) for key in "abcd"] == [True, False, True, True]


def test_a_row_that_is_put_again_counts_once():
    cache, out = RowCache(10_000), rows.zeros(1)
    cache.put("key", rows.zeros(1000))
    cache.put("key", np.array([5], np.int32))
    assert cache.nbytes < 1000
    assert cache.get("key", out)
    assert out.tolist() == [5]


@MODEST
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2000)), max_size=60))
def test_the_cache_never_holds_more_than_its_limit(puts):
    cache = RowCache(12_000)
    for key, words in puts:
        cache.put(key, rows.zeros(words))
        assert cache.nbytes <= 12_000
    cache.clear()
    assert (cache.nbytes, len(cache)) == (0, 0)


def test_a_row_larger_than_the_limit_is_not_kept():
    cache = RowCache(1000)
    cache.put("small", rows.zeros(1))
    cache.put("large", rows.zeros(1000))
    assert cache.get("small", rows.zeros(1))
    assert not cache.get("large", rows.zeros(1000))


def test_threads_that_share_a_cache_read_whole_rows():
    cache = RowCache(3 * 5000)
    torn = []

    def work(seed):
        out = rows.zeros(1000)
        for step in range(300):
            key = (seed + step) % 5
            if cache.get(key, out) and set(out.tolist()) != {key}:
                torn.append(out.copy())
            cache.put(key, np.full(1000, key, np.int32))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torn == []
    assert cache.nbytes <= cache.limit_bytes
