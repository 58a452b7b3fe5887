from __future__ import annotations

import os
import subprocess
import sys
import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles import byte_trie_twin as twin
from tests.oracles import vocabularies
from vllm_lazy_grammar.core import byte_trie, rows
from vllm_lazy_grammar.core.byte_trie import ByteTrie
from vllm_lazy_grammar.core.vocabulary import Vocabulary

MODEST = settings(derandomize=True, deadline=None, max_examples=60)
LETTERS = b"ab{\xc3\xa9"
PIECES = st.binary(max_size=5).map(lambda data: bytes(LETTERS[byte % len(LETTERS)] for byte in data))
ANYTHING = np.zeros((1, 256), np.int32)


def row_of(trie, table, state=0):
    row = rows.ones(trie.row_words)
    trie.survivors(table, state, row)
    return row


def ids_of(vocabulary, table, state=0):
    return rows.allowed_ids(row_of(ByteTrie(vocabulary), table, state), vocabulary.size).tolist()


@st.composite
def small_vocabularies(draw):
    pieces = draw(st.lists(PIECES, min_size=1, max_size=70))
    size = draw(st.integers(max(1, len(pieces) - 3), len(pieces) + 40))
    special = draw(st.sets(st.integers(0, size), max_size=3))
    return Vocabulary(pieces, size, special_ids=special)


@st.composite
def automata(draw, dead=byte_trie.DEAD):
    states = draw(st.integers(1, 4))
    table = np.full((states, 256), max(dead, byte_trie.DEAD), np.int32)
    for byte in LETTERS:
        table[:, byte] = draw(st.lists(st.integers(dead, states - 1), min_size=states, max_size=states))
    return table


def test_ab_ac_b_make_five_nodes_with_the_root():
    assert len(ByteTrie(Vocabulary([b"ab", b"ac", b"b"], 3))) == 5


@MODEST
@given(small_vocabularies())
def test_there_is_one_node_per_distinct_prefix(vocabulary):
    ordinary = [piece for token, piece in enumerate(vocabulary.pieces) if token not in vocabulary.special_ids]
    assert len(ByteTrie(vocabulary)) == len(twin.prefixes([*ordinary, b""]))


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_rejection_at_the_first_byte_and_rejection_later_are_alike(refused):
    table = twin.literal(b"abc")
    table[refused] = byte_trie.DEAD
    vocabulary = Vocabulary([b"a", b"ab", b"abc", b"abcd", b"b"], 5)
    assert ids_of(vocabulary, table) == list(range(refused))


def test_a_token_with_no_bytes_a_control_token_and_a_padding_id_are_never_allowed_by_the_walk():
    vocabulary = Vocabulary([b"a", b"", b"<s>"], 40, special_ids=[2], added={"<s>": 2})
    assert ids_of(vocabulary, ANYTHING) == [0]


def test_ids_at_and_beyond_the_models_vocabulary_are_not_inserted():
    trie = ByteTrie(Vocabulary([b"a", b"bcd"], 1))
    assert len(trie) == 2
    assert row_of(trie, ANYTHING).tolist() == [1]


def test_two_ids_with_the_same_bytes_are_both_answered():
    assert ids_of(Vocabulary([b"a", b"b", b"a"], 3), twin.literal(b"a")) == [0, 2]


def test_a_vocabulary_without_bytes_has_only_the_root():
    trie = ByteTrie(Vocabulary([], 3))
    assert len(trie) == 1
    assert row_of(trie, ANYTHING).tolist() == [0]
    assert trie.hitting(ANYTHING, np.ones(1, np.bool_), 0).tolist() == []


def test_the_walk_starts_at_the_given_state():
    assert ids_of(Vocabulary([b"a", b"b", b"bc"], 3), twin.literal(b"abc"), state=1) == [1, 2]


@MODEST
@given(small_vocabularies(), automata(), st.data())
def test_survivors_equal_the_slow_twin_bit_for_bit(vocabulary, table, data):
    state = data.draw(st.integers(0, len(table) - 1))
    assert row_of(ByteTrie(vocabulary), table, state).tolist() == twin.survivors(vocabulary, table, state).tolist()


@MODEST
@given(small_vocabularies(), automata(dead=0), st.data())
def test_tokens_that_hit_equal_the_slow_twins(vocabulary, table, data):
    state = data.draw(st.integers(0, len(table) - 1))
    hits = np.array(data.draw(st.lists(st.booleans(), min_size=len(table), max_size=len(table))))
    assert ByteTrie(vocabulary).hitting(table, hits, state).tolist() == twin.hitting(vocabulary, table, hits, state)


@MODEST
@given(small_vocabularies(), st.lists(PIECES.filter(bool), min_size=1, max_size=3), st.data())
def test_tokens_that_hit_from_a_begun_word_are_those_from_the_start_and_those_that_go_on(vocabulary, words, data):
    table, hits, number = twin.searching(words)
    start, state = number[b""], data.draw(st.integers(0, len(table) - 1))
    trie = ByteTrie(vocabulary)
    ahead = trie.hitting(table, hits, state, beyond=start)
    anyhow = trie.hitting(table, hits, start)
    assert sorted({*ahead.tolist(), *anyhow.tolist()}) == twin.hitting(vocabulary, table, hits, state)


def test_control_tokens_hit_by_their_text():
    vocabulary = Vocabulary([b"a", b"<s>", b"x<s"], 3, special_ids=[1], added={"<s>": 1})
    table, hits, number = twin.searching([b"<s"])
    assert ByteTrie(vocabulary).hitting(table, hits, number[b""]).tolist() == [1, 2]


def test_control_tokens_are_taken_by_their_text_where_that_is_asked_for():
    vocabulary = Vocabulary([b"<", b"<s>", b"</s>", b"<s"], 4, special_ids=[1, 2])
    row = rows.ones(1)
    ByteTrie(vocabulary).survivors(twin.literal(b"<s>"), 0, row, control=True)
    assert rows.allowed_ids(row, 4).tolist() == [0, 1, 3]


def test_no_bit_of_the_call_before_survives():
    trie = ByteTrie(Vocabulary([b"a", b"b"], 70))
    row = rows.ones(3)
    for text, expected in ((b"a", [1, 0, 0]), (b"b", [2, 0, 0]), (b"c", [0, 0, 0])):
        trie.survivors(twin.literal(text), 0, row)
        assert row.tolist() == expected


def test_a_refused_edge_prunes_everything_below_it():
    """The path is written only where a state lives, so what is pruned leaves no trace on it."""
    trie = ByteTrie(Vocabulary([b"ab", b"abc", b"abd"], 3))
    trie._scratch.path[0, :] = 7
    row_of(trie, twin.literal(b"a"))
    assert trie._scratch.path[0].tolist() == [0, 1, 7, 7]


def test_nothing_in_proportion_to_the_vocabulary_is_allocated_per_call():
    pieces = [token.to_bytes(3, "big") for token in range(100_000)]
    trie = ByteTrie(Vocabulary(pieces, len(pieces)))
    row = rows.zeros(trie.row_words)
    table, hits, number = twin.searching([b"\1\1"])
    trie.survivors(ANYTHING, 0, row)
    trie.hitting(table, hits, number[b""])
    tracemalloc.start()
    trie.survivors(ANYTHING, 0, row)
    found = trie.hitting(table, hits, number[b""])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found) == 257
    assert peak < 20_000


def test_scratch_space_is_per_thread():
    trie = ByteTrie(Vocabulary([b"ab", b"cd"], 2))
    seen = [trie._scratch.path]
    other = threading.Thread(target=lambda: seen.append(trie._scratch.path))
    other.start()
    other.join()
    assert seen[0] is trie._scratch.path
    assert not np.shares_memory(seen[0], seen[1])


def test_threads_that_walk_at_once_get_their_own_answers():
    pieces = [bytes([token % 256, token // 256]) for token in range(20_000)]
    trie = ByteTrie(Vocabulary(pieces, len(pieces)))
    tables = [np.where(np.arange(256) % 7 == k, -1, 0).astype(np.int32).reshape(1, 256) for k in range(4)]
    expected = [row_of(trie, table).tolist() for table in tables]
    answers = [[] for _ in tables]

    def ask(place):
        answers[place] = [row_of(trie, tables[place]).tolist() for _ in range(20)]

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(answer == expected[place] for place in range(4) for answer in answers[place])


def test_warming_compiles_everything_so_that_no_later_call_does():
    byte_trie.warm()
    compiled = [byte_trie._lay_out, byte_trie._survivors, byte_trie._hitting]
    before = [len(function.signatures) for function in compiled]
    trie = ByteTrie(Vocabulary([b"a", b"<s>"], 2, special_ids=[1]))
    table, hits, number = twin.searching([b"a"])
    for frozen in (False, True):
        table.setflags(write=not frozen)
        hits.setflags(write=not frozen)
        trie.survivors(table, number[b""], rows.zeros(1))
        trie.hitting(table, hits, number[b""], beyond=number[b"a"])
    assert [len(function.signatures) for function in compiled] == before


@pytest.mark.slow
@pytest.mark.parametrize("locators", ["UserProvidedCacheLocator", "UserWideCacheLocator"])
def test_a_package_folder_that_can_not_be_written_does_not_matter(tmp_path, locators):
    """With the first locator alone and no folder given, numba has nowhere to cache at all; the second is what it takes for a read-only package."""
    env = {
        **os.environ,
        "NUMBA_CACHE_LOCATOR_CLASSES": locators,
        "XDG_CACHE_HOME": str(tmp_path),
        "NUMBA_CACHE_DIR": "",
    }
    code = "from vllm_lazy_grammar.core import rows; rows.warm(); print(rows.masks_anything(rows.ones(2)))"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert any(tmp_path.rglob("*.nbi")) == (locators == "UserWideCacheLocator")


def real_automata():
    string = np.zeros((1, 256), np.int32)
    string[0, [*range(32), ord('"'), ord("\\")]] = byte_trie.DEAD
    random = np.random.default_rng(5).integers(-1, 6, (6, 256)).astype(np.int32)
    return {
        "everything": ANYTHING,
        "inside a string": string,
        "a literal": twin.literal(b'<tool_call>\n{"name": "get'),
        "random": random,
    }


@pytest.mark.shared
@pytest.mark.skipif(not vocabularies.SHARED.is_dir(), reason="no folder with shared data beside the checkout")
@pytest.mark.parametrize("name", real_automata())
def test_survivors_equal_the_slow_twin_on_qwen3(name):
    vocabulary, table = vocabularies.qwen3(), real_automata()[name]
    assert np.array_equal(row_of(ByteTrie(vocabulary), table), twin.survivors(vocabulary, table, 0))


@pytest.mark.shared
@pytest.mark.skipif(not vocabularies.SHARED.is_dir(), reason="no folder with shared data beside the checkout")
def test_tokens_that_hit_equal_the_slow_twins_on_qwen3():
    vocabulary = vocabularies.qwen3()
    table, hits, number = twin.searching([b"<tool_call>", b"<function=", b"{"])
    trie = ByteTrie(vocabulary)
    for begun in (b"", b"<tool"):
        expected = twin.hitting(vocabulary, table, hits, number[begun])
        assert trie.hitting(table, hits, number[begun]).tolist() == expected


@pytest.mark.vllm
@pytest.mark.parametrize("size", [131_072, 131_043])
@pytest.mark.parametrize("name", real_automata())
def test_survivors_equal_the_slow_twin_on_tekken(name, size):
    vocabulary, table = vocabularies.tekken(size), real_automata()[name]
    assert np.array_equal(row_of(ByteTrie(vocabulary), table), twin.survivors(vocabulary, table, 0))
