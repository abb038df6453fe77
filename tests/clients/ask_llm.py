"""llm, with the models listed in the file extra-openai-models.yaml."""

import base64
import json
import os
import tempfile
from pathlib import Path

import openai
from asked import CAPTION, LOOK, PICTURE, QUESTION, URL, Count, Scene, refusal

# JSON is YAML.
MODEL = {"model_name": "default", "api_base": URL, "vision": True, "supports_schema": True}
MODELS = [{"model_id": "chat", **MODEL}, {"model_id": "responses", "responses": True, **MODEL}]


def results_of(name: str, route: str) -> dict:
    picture = llm.Attachment(type="image/png", content=base64.b64decode(PICTURE.partition(",")[2]))

    def ask(text: str, **settings):
        return llm.get_model(name).prompt(text, attachments=[picture], **settings)

    def look(schema: type) -> str:
        return ask(LOOK, schema=schema).text()

    return {
        "route": route,
        "caption": ask(CAPTION, stream=False).text(),
        "answer": ask(QUESTION, stream=False).text(),
        "pieces": list(ask(CAPTION)),
        "structured": json.loads(look(Scene)),
        "numbers": refusal(openai.BadRequestError, look, Count),
        "refused": {},
    }


with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "extra-openai-models.yaml").write_text(json.dumps(MODELS))
    os.environ["LLM_USER_PATH"] = folder
    import llm

    results = {
        "model": results_of("chat", "/v1/chat/completions"),
        "model with `responses: true`": results_of("responses", "/v1/responses"),
    }
print(json.dumps(results))
