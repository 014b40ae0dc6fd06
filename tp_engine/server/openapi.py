"""The server's own description at ``/openapi.json``.

The routes parse their bodies themselves, so that errors have OpenAI's shape; FastAPI learns the schemas here.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

_REF = "#/components/schemas/"
_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def _answers(error: str) -> dict[int | str, dict[str, Any]]:
    described = {"description": "An error", "content": {"application/json": {"schema": {"$ref": _REF + error}}}}
    done = {"description": "Done", "content": {"application/json": {"schema": {"type": "object"}}}}
    return {200: done, "4XX": described, "5XX": described}


# For the ``responses`` of a route.
ANSWERS = _answers("Error")


def takes(body: type[BaseModel], *, error: str = "Error") -> dict[str, Any]:
    """The keywords of a route whose handler parses ``body`` itself; ``error`` names the schema of its errors."""
    schema = body.model_json_schema(ref_template=_REF + "{model}")
    content = {"application/json": {"schema": schema}}
    return {"responses": _answers(error), "openapi_extra": {"requestBody": {"required": True, "content": content}}}


def install_openapi(app: FastAPI) -> None:
    """Have ``app`` describe itself, with the schemas of ``takes`` among its components."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _schema(app)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def _schema(app: FastAPI) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes, description=app.description)
    parts = schema.setdefault("components", {}).setdefault("schemas", {})
    parts |= {"Error": _ERROR_SCHEMA, "AnthropicError": _ANTHROPIC_SCHEMA}
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            parts.update(body.pop("$defs", {}))
    return schema
