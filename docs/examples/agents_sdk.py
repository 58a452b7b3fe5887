"""The OpenAI Agents SDK: tools and an output type in one request."""

import asyncio
import sys
from typing import Annotated, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    RunResult,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field


class Advice(BaseModel):
    take: Literal["umbrella", "sunglasses", "nothing"]
    reason: Annotated[str, Field(max_length=60)]


@function_tool
def get_weather(city: Annotated[str, Field(max_length=20)], days: Annotated[int, Field(ge=1, le=9)]) -> str:
    """The weather of the next days in a city."""
    return f"{city}, the next {days} days: rain."


async def advise(client: AsyncOpenAI, extra_body: dict | None) -> RunResult:
    model = (await client.models.list()).data[0].id
    agent = Agent(
        name="Adviser",
        instructions="Look up the weather once, then advise.",
        model=OpenAIChatCompletionsModel(model, openai_client=client),
        model_settings=ModelSettings(
            tool_choice="required",  # in the first turn; then the SDK leaves the choice to the model
            parallel_tool_calls=False,
            max_tokens=100,
            temperature=0,
            extra_body=extra_body,
        ),
        tools=[get_weather],
        output_type=Advice,
    )
    return await Runner.run(agent, "I go to Paris for 3 days. What do I take along?", max_turns=4)


async def run(base_url: str, extra_body: dict | None) -> RunResult:
    async with AsyncOpenAI(base_url=base_url, api_key="-") as client:
        return await advise(client, extra_body)


def main(base_url: str = "http://localhost:8000/v1", extra_body: dict | None = None) -> RunResult:
    set_tracing_disabled(True)  # else it would be sent to OpenAI
    return asyncio.run(run(base_url, extra_body))


if __name__ == "__main__":
    print(main(*sys.argv[1:]).final_output)
