"""The OpenAI client: a tool is called, its result goes back, and the model answers."""

import json
import sys

from openai import OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of the next days in a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 20},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city", "days"],
            },
        },
    }
]


def get_weather(city: str, days: int) -> str:
    return f"{city}, the next {days} days: sunny."


def main(base_url: str = "http://localhost:8000/v1") -> list[dict]:
    client = OpenAI(base_url=base_url, api_key="-")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is the weather in Paris for 3 days?"}]
    asked = {"model": model, "messages": messages, "tools": TOOLS, "max_tokens": 100, "temperature": 0}

    called = client.chat.completions.create(**asked, tool_choice="required").choices[0].message
    messages.append(called.model_dump(exclude_none=True))
    for call in called.tool_calls:
        result = get_weather(**json.loads(call.function.arguments))  # obeys the schema: no check is needed
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    answer = client.chat.completions.create(**asked, tool_choice="none").choices[0].message
    messages.append(answer.model_dump(exclude_none=True))
    return messages


if __name__ == "__main__":
    for message in main(*sys.argv[1:]):
        print(message)
