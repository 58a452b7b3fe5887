"""pydantic-ai, its output as a tool call and as a response format."""

import asyncio
import sys
from typing import Annotated, Literal

from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Review(BaseModel):
    sentiment: Literal["positive", "negative", "mixed"]
    stars: Annotated[int, Field(ge=1, le=5)]


async def run(base_url: str) -> list[Review]:
    async with AsyncOpenAI(base_url=base_url, api_key="-") as client:
        name = (await client.models.list()).data[0].id
        model = OpenAIChatModel(name, provider=OpenAIProvider(openai_client=client))
        reviews = []
        for output in (ToolOutput(Review), NativeOutput(Review)):
            settings = {"max_tokens": 100, "temperature": 0}
            agent = Agent(model, output_type=output, retries=0, model_settings=settings)
            reviews.append((await agent.run("Review: the kettle boils fast. I like it.")).output)
        return reviews


def main(base_url: str = "http://localhost:8000/v1") -> list[Review]:
    return asyncio.run(run(base_url))


if __name__ == "__main__":
    for review in main(*sys.argv[1:]):
        print(review.model_dump_json())
