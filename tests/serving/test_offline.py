"""vLLM's offline `LLM`: with `register()`, without it, in this process, and under an external launcher at world size 1."""

from __future__ import annotations

import json
import re

import pytest

from tests.serving.asking import PERSON, is_person
from tests.serving.servers import ServerError, free_port

pytestmark = pytest.mark.server

HEAD = f"""
import gc, sys
import vllm_lazy_grammar
from vllm_lazy_grammar import LazyGrammar, sampling_params
from tests.serving.models import demo_model
from tests.serving.wishes import PROCESSOR, spell, tokens

PERSON = {json.loads(json.dumps(PERSON))!r}


def engine(**options):
    from vllm import LLM

    return LLM(
        str(demo_model()), structured_outputs_config={{"backend": "lazy"}}, max_model_len=512, enforce_eager=True,
        logits_processors=[PROCESSOR], **options,
    )


def answers(llm):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    lazily = sampling_params(
        LazyGrammar(grammar='root ::= "<t>" [0-9] [0-9]', triggers=["word:<t>"]),
        temperature=0, max_tokens=32, extra_args={{"wishes": [*tokens("so <t>"), *spell("ab"), 2]}},
    )
    eager = SamplingParams(temperature=0, max_tokens=48, structured_outputs=StructuredOutputsParams(json=PERSON))
    plain = SamplingParams(temperature=0, max_tokens=4)
    outputs = [
        out.outputs[0].text
        for _ in range(2)  # the same parameters may be used again
        for out in llm.generate(["Once", "A person:", "Once"], [lazily, eager, plain], use_tqdm=False)
    ]
    return outputs
"""

REGISTERED = HEAD + "\nvllm_lazy_grammar.register()\n"


def assert_right(outputs):
    lazily, eager, plain, *again = outputs
    assert re.fullmatch("so <t>[0-9]{2}", lazily)
    assert is_person(eager), eager
    assert plain
    assert again == [lazily, eager, plain]


def test_with_the_engine_in_its_own_process(offline):
    assert_right(offline(REGISTERED + "\ndef main():\n    return answers(engine())"))


IN_PROCESS = (
    REGISTERED
    + """
def refused(llm, **options):
    from vllm.sampling_params import BeamSearchParams

    try:
        llm.beam_search(["Once"], BeamSearchParams(beam_width=2, max_tokens=2, **options))
    except Exception as error:
        return str(error)
    return None


def main():
    llm = engine()
    core = llm.llm_engine.engine_core.engine_core
    said = answers(llm)
    gc.collect()
    from vllm.sampling_params import StructuredOutputsParams

    beams = refused(llm, structured_outputs=StructuredOutputsParams(json=PERSON)), refused(llm)
    return said, type(core).__name__, type(core.structured_output_manager).__name__, beams
"""
)


def test_with_the_engine_in_this_process_where_beam_search_with_a_grammar_is_refused(offline):
    said, core, manager, (with_grammar, without) = offline(IN_PROCESS, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert_right(said)
    assert (core, manager) == ("EngineCore", "LazyManager")
    assert "beam search" in with_grammar
    assert without is None


def test_under_an_external_launcher_at_world_size_1_which_compiles_inline(offline):
    source = (
        REGISTERED
        + """
def main():
    import threading
    llm = engine(distributed_executor_backend="external_launcher")
    said = answers(llm)
    threads = [thread.name for thread in threading.enumerate() if "lazy" in thread.name.lower()]
    return said, type(llm.llm_engine.engine_core.engine_core.model_executor).__name__, threads
"""
    )
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    said, executor, threads = offline(
        source, **launched, MASTER_PORT=str(free_port()), VLLM_ENABLE_V1_MULTIPROCESSING="0"
    )
    assert_right(said)
    assert executor == "ExecutorWithExternalLauncher"
    assert threads == []


def test_without_register_the_backend_is_unknown_and_vllm_says_so(offline):
    with pytest.raises(
        ServerError, match=r"backend\s+Input should be 'auto', .*\[type=literal_error, input_value='lazy'"
    ):
        offline(HEAD + "\ndef main():\n    return answers(engine())")
