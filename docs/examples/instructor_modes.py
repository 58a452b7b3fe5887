"""instructor, in tool mode and in JSON mode."""

import sys
from typing import Annotated, Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field


class Review(BaseModel):
    sentiment: Literal["positive", "negative", "mixed"]
    stars: Annotated[int, Field(ge=1, le=5)]


MODES = (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)


def main(base_url: str = "http://localhost:8000/v1") -> list[Review]:
    client = OpenAI(base_url=base_url, api_key="-")
    model = client.models.list().data[0].id
    return [
        instructor.from_openai(client, mode=mode).chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Review: the kettle boils fast. I like it."}],
            response_model=Review,
            max_tokens=100,
            temperature=0,
            max_retries=0,  # none is needed: the first answer obeys the schema
        )
        for mode in MODES
    ]


if __name__ == "__main__":
    for review in main(*sys.argv[1:]):
        print(review.model_dump_json())
