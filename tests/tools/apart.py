"""Sets of tools taken apart: tools, texts of their grammar, and vocabularies whose tokens go over whatever there is to go over."""

from __future__ import annotations

import random

from tests.core.dispatching import Pair
from tests.tools import instances, walking
from tests.tools.cases import choice_for, closers, preset_of, servable
from vllm_lazy_grammar.core.vocabulary import Vocabulary
from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine
from vllm_lazy_grammar.tools.parts import plan_of

LONGEST = 9
SPECIAL = "<special>"


def tools_for(family, seed, least=2):
    """Tools of a family with names of their own, at least so many; None where it can not write so many."""
    found = {}
    for draw in range(seed, seed + 40):
        for tool in servable(family, instances.tools_and_calls(draw, awkward=draw % 2 == 1)[0]):
            found.setdefault(tool["function"]["name"], tool)
        if len(found) >= least:
            return list(found.values())
    return None


def texts_of(family, choice, seed, count=2):
    """Texts of a grammar."""
    rng = random.Random(seed)  # noqa: S311 -- the same in every run
    found = (walking.random_call(choice, rng, closers(preset_of(family))) for _ in range(4 * count))
    return [text for text in found if text is not None][:count]


def choice_and_texts(family, seed, **options):
    """A choice between at least two tools, and texts of its grammar; None where the family can not write so many."""
    tools = tools_for(family, seed)
    if tools is None:
        return None
    choice = choice_for(family, tools, **options)
    return choice, texts_of(family, choice, seed)


def vocabulary_with(texts, rng, pieces=250):
    """All bytes, and pieces of the texts."""
    kept = [bytes((byte,)) for byte in range(256)]
    whole = b"".join(texts)
    for _ in range(pieces if whole else 0):
        begin = rng.randrange(len(whole))
        kept.append(whole[begin : begin + rng.randint(2, LONGEST)])
    kept += [rng.choice(kept) + rng.choice(kept) for _ in range(20)]
    return Vocabulary(
        [*kept, SPECIAL.encode(), b""], len(kept) + 40, special_ids=[len(kept)], added={SPECIAL: len(kept)}
    )


def pair_of(key, vocabulary):
    """The grammar twice, by xgrammar."""
    return Pair(key, vocabulary, XgrammarEngine(vocabulary, max_threads=1), plan_of)
