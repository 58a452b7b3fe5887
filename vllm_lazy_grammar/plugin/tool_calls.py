"""The seams of tool calls: where a request with tools gets its grammar, and what its answer's finish reason is."""
# ruff: noqa: PLC0415 -- vLLM, and what imports it, is imported only inside functions

from __future__ import annotations

from vllm_lazy_grammar._seams import Accepts, Exists, LooksUp, Parameters, Seam, Target
from vllm_lazy_grammar.plugin.names import CHAT, RESPONSES

_RENDERER = "vllm.renderers.online_renderer"
_PARSE = "vllm.parser.abstract_parser"
_DELTA = ("delta_text", "delta_token_ids")


def tools() -> list[Seam]:
    """Requests with tools get their grammar."""
    from vllm_lazy_grammar.adapter import tool_parsers

    get = Target("vllm.parser.parser_manager", "ParserManager.get_parser")
    parser = "DelegatingParser.{}"
    looks = (
        (_RENDERER, "OnlineRenderer.__init__", "get_parser"),
        (f"{CHAT}.serving", "OpenAIServingChat.__init__", "get_parser"),
        (f"{RESPONSES}.serving", "OpenAIServingResponses.__init__", "get_parser"),
        (_RENDERER, "OnlineRenderer.preprocess_chat", "always_adjust_request"),
        (_RENDERER, "OnlineRenderer.preprocess_chat", "adjust_request"),
        (_PARSE, parser.format("adjust_request"), "_apply_structural_tag"),
        (_PARSE, parser.format("_extract_tool_calls"), "supports_required_and_named"),
        (_PARSE, parser.format("_extract_tool_calls_streaming"), "supports_required_and_named"),
    )
    return [
        Seam(
            get,
            tool_parsers.getting_parser,
            why="requests with tools get a grammar that waits for the call",
            until="vLLM's tool parsers ask the structured output backend for their grammar",
            checks=(
                *(Accepts(get, name) for name in ("model_name", "tool_parser_name", "is_harmony", "tokenizer")),
                *(LooksUp(Target(module, path), name) for module, path, name in looks),
                Parameters(Target(_PARSE, parser.format("parse")), ("self", "model_output", "request")),
                Parameters(Target(_PARSE, parser.format("parse_delta")), ("self", *_DELTA, "request")),
                Parameters(Target("vllm.tool_parsers.utils", "get_function_tools"), ("tools",)),
                Parameters(Target(_PARSE, "structured_outputs_to_format"), ("params",)),
            ),
        )
    ]


def finish() -> list[Seam]:
    """The finish reason of an answer with tools."""
    from vllm_lazy_grammar.adapter.finish import choosing

    def seam(name: str, *fields: str) -> Seam:
        made = Target(f"{CHAT}.protocol", name)
        return Seam(
            Target(f"{CHAT}.serving", name),
            choosing,
            why="`tool_calls` is the finish reason of no answer without a call, nor of one that a stop string cut",
            until="that is so in vLLM",
            checks=(
                LooksUp(Target(f"{CHAT}.serving", "OpenAIServingChat"), name),
                *(Exists(Target(made.module, f"{made.path}.__pydantic_fields__[{field}]")) for field in fields),
            ),
        )

    return [
        seam("ChatCompletionResponseChoice", "finish_reason", "stop_reason", "message"),
        seam("ChatCompletionResponseStreamChoice", "finish_reason", "stop_reason"),
    ]
