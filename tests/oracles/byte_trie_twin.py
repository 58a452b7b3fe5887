"""The byte trie's slow twin: every token is simulated on its own."""

from __future__ import annotations

import numpy as np


def survivors(vocabulary, table, state):
    """The row of the tokens all of whose bytes the automaton accepts."""
    row = np.zeros(vocabulary.row_words, np.int32)
    words = row.view(np.uint32)
    edges = table.tolist()
    for token, piece in enumerate(vocabulary.pieces):
        if piece and token not in vocabulary.special_ids and _accepts(edges, state, piece):
            words[token // 32] |= np.uint32(1 << token % 32)
    return row


def _accepts(edges, state, piece):
    for byte in piece:
        state = edges[state][byte]
        if state < 0:
            return False
    return True


def hitting(vocabulary, table, hits, state):
    """The ids of the tokens during which a hit state is entered."""
    edges = table.tolist()
    return [token for token, piece in enumerate(vocabulary.pieces) if _enters(edges, hits, state, piece)]


def _enters(edges, hits, state, piece):
    for byte in piece:
        state = edges[state][byte]
        if hits[state]:
            return True
    return False


def prefixes(pieces):
    """All distinct prefixes of the pieces, the empty one included."""
    return {piece[:end] for piece in pieces for end in range(len(piece) + 1)}


def literal(text):
    """The automaton that accepts the prefixes of one text."""
    table = np.full((len(text) + 1, 256), -1, np.int32)
    for place, byte in enumerate(text):
        table[place, byte] = place + 1
    return table


def searching(words):
    """The complete automaton whose state is the longest suffix of the text that begins one of the words, and the states where a word ends."""
    begun = sorted(prefixes(words))
    number = {prefix: state for state, prefix in enumerate(begun)}
    table = np.zeros((len(begun), 256), np.int32)
    for prefix, state in number.items():
        for byte in range(256):
            text = prefix + bytes([byte])
            table[state, byte] = next(number[text[cut:]] for cut in range(len(text) + 1) if text[cut:] in number)
    hits = np.array([any(prefix.endswith(word) for word in words) for prefix in begun])
    return table, hits, number
