"""The Anthropic client on /v1/messages: a tool is called, whole and streamed."""

import sys

from anthropic import Anthropic

TOOLS = [
    {
        "name": "get_weather",
        "description": "The weather of the next days in a city.",
        "input_schema": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
        },
    }
]


def main(base_url: str = "http://localhost:8000/v1") -> list:
    client = Anthropic(base_url=base_url.removesuffix("/v1"), api_key="-")  # the client adds /v1 itself
    asked = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": "What is the weather in Paris for 3 days?"}],
        "tools": TOOLS,
        "tool_choice": {"type": "any"},
        "max_tokens": 100,
    }
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    return [client.messages.create(**asked), streamed]


if __name__ == "__main__":
    for message in main(*sys.argv[1:]):
        print(message.stop_reason, message.content)
