"""The OpenAI client: prose first, then JSON that obeys a schema."""

import sys

from openai import OpenAI

from vllm_lazy_grammar import LazyGrammar

REVIEW = {
    "type": "object",
    "properties": {"sentiment": {"enum": ["positive", "negative", "mixed"]}, "stars": {"type": "integer"}},
    "required": ["sentiment", "stars"],
}
PROMPT = "The kettle is great. Say why it is good or bad, then write <answer> and the JSON."


def main(base_url: str = "http://localhost:8000/v1") -> str:
    client = OpenAI(base_url=base_url, api_key="-")
    lazily = LazyGrammar(json=REVIEW, triggers=["word:<answer>"], start="after", mandatory=True, force_after=40)
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=100,
        temperature=0,
        extra_body=lazily.extra_body(),
    )
    return answer.choices[0].message.content


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
