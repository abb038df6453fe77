"""langchain-openai."""

import json

import openai
from asked import CAPTION, LOOK, QUESTION, URL, Count, Scene, chat_messages, refusal
from langchain_openai import ChatOpenAI


def results_of(route: str, **settings) -> dict:
    model = ChatOpenAI(model="default", base_url=URL, api_key="none", max_retries=0, **settings)

    def look(**output):
        return model.with_structured_output(**output).invoke(chat_messages(LOOK))

    return {
        "route": route,
        "caption": model.invoke(chat_messages(CAPTION)).text,
        "answer": model.invoke(chat_messages(QUESTION)).text,
        "pieces": [chunk.text for chunk in model.stream(chat_messages(CAPTION))],
        "structured": look(schema=Scene).model_dump(),
        "numbers": refusal(openai.BadRequestError, look, schema=Count),
        "refused": {
            "tools": refusal(openai.BadRequestError, look, schema=Scene, method="function_calling"),
        },
    }


results = {
    "`ChatOpenAI`": results_of("/v1/chat/completions"),
    "`ChatOpenAI(use_responses_api=True)`": results_of("/v1/responses", use_responses_api=True),
}
print(json.dumps(results))
