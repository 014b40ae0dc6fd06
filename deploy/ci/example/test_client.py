"""Two tests of a client: the program under test is OpenAI's, and the server is a real one."""

import openai
import pytest


@pytest.fixture(scope="session")
def client(tp_server):
    return openai.OpenAI(base_url=tp_server.base_url, api_key=tp_server.api_key)


def test_an_answer(client, tp_server):
    answer = client.chat.completions.create(
        model=tp_server.model, messages=[{"role": "user", "content": "12+34="}], temperature=0
    )
    assert answer.choices[0].message.content == "46"


def test_a_stream(client, tp_server):
    chunks = client.chat.completions.create(
        model=tp_server.model, messages=[{"role": "user", "content": "sort: 3 1 4"}], temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "1 3 4"
