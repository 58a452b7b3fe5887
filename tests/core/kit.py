"""Sessions over the small vocabulary and the fake engine, for tests."""

from __future__ import annotations

import numpy as np

from vllm_lazy_grammar.core.awaiting import AwaitingRows
from vllm_lazy_grammar.core.blanks import BlankBound
from vllm_lazy_grammar.core.byte_trie import ByteTrie
from vllm_lazy_grammar.core.compiles import GrammarStore
from vllm_lazy_grammar.core.control import ControlTokens
from vllm_lazy_grammar.core.dispatch import Dispatcher
from vllm_lazy_grammar.core.gate import Gate
from vllm_lazy_grammar.core.inside import Blanks, Inside
from vllm_lazy_grammar.core.leading import EndingsStore
from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.core.prewarm import Worker
from vllm_lazy_grammar.core.rows import RowCache
from vllm_lazy_grammar.core.session import Session
from vllm_lazy_grammar.core.triggers import Triggers, TriggerSpec
from vllm_lazy_grammar.testing import SMALL_END, SMALL_TEXTS, FakeEngine, allowed_ids, small_vocabulary

VOCABULARY = small_vocabulary()
ENDS = frozenset((SMALL_END,))


def ids(*texts):
    """The ids of these texts; the special tokens by their text too."""
    return [VOCABULARY.token_of(t) for t in texts]


class Workshop:
    """What sessions share: an engine that can be held, a worker, caches. `threads=0` compiles at once."""

    def __init__(
        self, *, threads=0, held=False, vocabulary=VOCABULARY, engine=None, prewarm=8, bound=20, kept=1 << 24, plan=None
    ):
        self.vocabulary = vocabulary
        self.engine = FakeEngine(vocabulary, held=held) if engine is None else engine
        self.worker = Worker(threads)
        self.rows = RowCache(1 << 22)
        self.trie = ByteTrie(vocabulary)
        self.waits = []
        dispatcher = plan and Dispatcher(self.trie, plan, lambda key, seconds: self.waits.append((key, seconds)))
        self.store = GrammarStore(
            self.engine,
            self.worker,
            self.rows,
            vocabulary.row_words,
            limit_bytes=kept,
            top_k=prewarm,
            dispatcher=dispatcher,
        )
        self.bound = BlankBound(vocabulary, bound)
        self.endings = EndingsStore(vocabulary, self.trie, self.worker)

    def session(self, source, *triggers, kind="regex", stops=ENDS, blanks=None, budget=False, **options):
        """An eager session, or with triggers a lazy one; `options` as in vllm_xargs, without ``grammar_``."""
        compile_ = self.store.get(GrammarKey(kind, source))
        control = ControlTokens(self.vocabulary, (), "\n".join((source, *triggers)))
        over = None if blanks is None else Blanks(self.bound, blanks)
        inside = Inside(self.vocabulary, compile_, control, over, frozenset(stops), self.rows)
        endings = self.endings if budget else None
        if not triggers:
            return Session(inside, compile_, endings=endings)
        xargs = {"grammar_triggers": list(triggers), **{f"grammar_{k}": v for k, v in options.items()}}
        spec = TriggerSpec.parse(xargs)
        compiled = Triggers.compile(spec, self.vocabulary, stop_ids=stops)
        gate = Gate(compiled, self.vocabulary)
        awaiting = AwaitingRows(self.vocabulary, self.trie, self.rows, compiled, inside, compile_)
        return Session(inside, compile_, spec, gate, awaiting, endings)

    def close(self):
        """End the worker."""
        if hasattr(self.engine, "release"):
            self.engine.release()
        self.worker.close()


def row(session):
    """(whether anything is masked, the allowed ids)."""
    out = np.zeros(VOCABULARY.row_words, np.int32)
    masks = session.fill(out)
    return masks, allowed_ids(out)


def allowed_texts(session):
    """The texts that the row allows, sorted; special tokens by their text, other ids that have no text in SMALL_TEXTS left out."""
    _, found = row(session)
    return sorted({VOCABULARY.piece(t).decode() for t in found if t < len(SMALL_TEXTS) or t in VOCABULARY.special_ids})


def feed(session, *texts):
    """Accept these texts' tokens; true where all were accepted."""
    accepted = [session.accept(t) for t in ids(*texts)]
    return all(accepted)


def state(session):
    """Everything a caller can see of a session."""
    return (
        row(session),
        session.phase,
        session.buffer,
        session.is_terminated(),
        session.blocks_stop(),
        session.num_offered,
        session.num_history_steps,
        session.forced_token(),
        [(e.kind, e.token) for e in session.trace.events[: session._walk.at.events]],
    )
