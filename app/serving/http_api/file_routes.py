"""`/v1/files` and `/v1/batches`: OpenAI's files and batches, as routes and schemas."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, Generic, Literal, Self, TypeVar, get_args

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.types import Scope

from llama_adapter.app.serving.http_api.batches import Batch, BatchError, Batches, Endpoint, Status
from llama_adapter.app.serving.http_api.errors import ApiError
from llama_adapter.app.serving.http_api.file_store import Purpose
from llama_adapter.app.serving.http_api.schemas import Part, documentation, error_replies
from llama_adapter.app.serving.http_api.uploads import RefusedUpload, Uploads

FILES_PATH = "/v1/files"  # an upload's body is read by its route, not by `BodyLimit`
MAX_LISTED = 10_000  # the same limit as OpenAI's
_DEFAULT_LISTED = 20

After = Annotated[str | None, Query(max_length=100, description="Id of the last object of the previous page.")]
Shown = Annotated[int, Query(ge=1, le=MAX_LISTED)]
Seconds = Annotated[int, BeforeValidator(int)]  # without their fraction


class FileObject(BaseModel):
    """A kept file, made of its `StoredFile`."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    object: Literal["file"] = "file"
    bytes: int = Field(validation_alias="num_bytes")
    created_at: Seconds
    filename: str = Field(validation_alias="name")
    purpose: Purpose
    status: Literal["processed"] = "processed"


class DeletedFile(BaseModel):
    """A file is deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchRequest(Part):
    """A new batch."""

    input_file_id: str = Field(max_length=100)
    endpoint: Endpoint = Field(description="`url` of all rows.")
    completion_window: Literal["24h"] = Field(description="Without effect: batches do not expire.")
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    output_expires_after: None = None


class BatchErrors(BaseModel):
    """The errors that ended a batch."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(BaseModel):
    """The number of rows, and how many were answered or failed. `total` is 0 until the rows are counted."""

    total: int
    completed: int
    failed: int


class BatchObject(BaseModel):
    """A batch. Times are seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: Seconds
    in_progress_at: Seconds | None
    expires_at: None = None
    finalizing_at: Seconds | None
    completed_at: Seconds | None
    failed_at: Seconds | None
    expired_at: None = None
    cancelling_at: Seconds | None
    cancelled_at: Seconds | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


_Object = TypeVar("_Object", FileObject, BatchObject)


class _Page(BaseModel, Generic[_Object]):
    object: Literal["list"] = "list"
    data: list[_Object]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, objects: Sequence[_Object], *, after: str | None, limit: int, order: str = "desc") -> Self:
        """A page of `objects`, which are sorted by time, oldest first. Raises ApiError if `after` is not among them."""
        ordered = list(objects if order == "asc" else reversed(objects))
        ids = [one.id for one in ordered]
        if after is not None and after not in ids:
            raise ApiError("`after` is no id of this list.", status=404, param="after")
        start = 0 if after is None else ids.index(after) + 1
        page = ordered[start : start + limit]
        return cls(
            data=page,
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=start + limit < len(ordered),
        )


class FileList(_Page[FileObject]):
    """A page of files."""


class BatchList(_Page[BatchObject]):
    """A page of batches."""


_CONTENT: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/jsonl": {"schema": {"type": "string"}}}, "description": "The content."}
}


def add_file_routes(router: APIRouter, batches: Batches) -> None:
    """Add the routes below `/v1`."""
    store, uploads = batches.files, Uploads(batches.files)

    @router.post(
        "/files",
        tags=["files"],
        response_model=FileObject,
        responses=error_replies(400, 401, 408, 413, 415, 503),
        openapi_extra={"requestBody": documentation()["upload"]},
    )
    async def create_file(request: Request) -> Response | FileObject:
        """Upload a JSONL file of requests for a batch."""
        try:
            return FileObject.model_validate(await uploads.receive(request, owner=_owner(request.scope)))
        except ApiError as error:
            return RefusedUpload(error)

    @router.get("/files", tags=["files"], responses=error_replies(400, 401, 404))
    def list_files(
        request: Request,
        after: After = None,
        limit: Shown = MAX_LISTED,
        order: Literal["asc", "desc"] = "desc",
        purpose: Purpose | None = None,
    ) -> FileList:
        """The kept files: uploads, and the output files of batches."""
        files = [file for file in store.all(owner=_owner(request.scope)) if purpose in (None, file.purpose)]
        return FileList.of([FileObject.model_validate(file) for file in files], after=after, limit=limit, order=order)

    @router.get("/files/{file_id}", tags=["files"], responses=error_replies(401, 404))
    def retrieve_file(file_id: str, request: Request) -> FileObject:
        """The description of a file."""
        return FileObject.model_validate(store.find(file_id, owner=_owner(request.scope)))

    @router.delete("/files/{file_id}", tags=["files"], responses=error_replies(401, 404, 409))
    def delete_file(file_id: str, request: Request) -> DeletedFile:
        """Delete a file that no unfinished batch reads."""
        batches.remove_file(file_id, owner=_owner(request.scope))
        return DeletedFile(id=file_id)

    @router.get(
        "/files/{file_id}/content",
        tags=["files"],
        response_class=FileResponse,
        responses={**_CONTENT, **error_replies(401, 404)},
    )
    def read_file(file_id: str, request: Request) -> FileResponse:
        """The content of a file."""
        file = store.find(file_id, owner=_owner(request.scope))
        headers = {"x-content-type-options": "nosniff"}
        return FileResponse(store.path(file.id), media_type="application/jsonl", filename=file.name, headers=headers)

    @router.post("/batches", tags=["batches"], responses=error_replies(400, 401, 404, 408, 413, 415, 429))
    def create_batch(wanted: BatchRequest, request: Request) -> BatchObject:
        """Answer the requests of a file. Other requests go first."""
        batch = batches.create(
            endpoint=wanted.endpoint,
            input_file_id=wanted.input_file_id,
            metadata=wanted.metadata,
            owner=_owner(request.scope),
        )
        return _batch_object(batch)

    @router.get("/batches", tags=["batches"], responses=error_replies(400, 401, 404))
    def list_batches(request: Request, after: After = None, limit: Shown = _DEFAULT_LISTED) -> BatchList:
        """The batches, newest first."""
        found = [_batch_object(batch) for batch in batches.all(owner=_owner(request.scope))]
        return BatchList.of(found, after=after, limit=limit)

    @router.get("/batches/{batch_id}", tags=["batches"], responses=error_replies(401, 404))
    def retrieve_batch(batch_id: str, request: Request) -> BatchObject:
        """The state of a batch."""
        return _batch_object(batches.find(batch_id, owner=_owner(request.scope)))

    @router.post("/batches/{batch_id}/cancel", tags=["batches"], responses=error_replies(401, 404, 409))
    def cancel_batch(batch_id: str, request: Request) -> BatchObject:
        """Stop a batch; the answers so far are kept."""
        return _batch_object(batches.cancel(batch_id, owner=_owner(request.scope)))


def files_are_off() -> ApiError:
    """The error that a server without a folder for files answers."""
    message = "This server keeps no files and no batches: send each request to its own path."
    return ApiError(message, status=404, code="files_not_enabled")


def _owner(scope: Scope) -> str | None:
    """The owner of files: the API key of the request, or None if the server requires no key.

    A key sees its own files only.
    """
    client = str(scope.get("state", {}).get("client", ""))
    return client if client.startswith("key:") else None


def _batch_object(batch: Batch) -> BatchObject:
    fields = {
        **asdict(batch),
        **{f"{status}_at": batch.times.get(status) for status in get_args(Status)},
        "errors": BatchErrors(data=batch.errors) if batch.errors else None,
        "request_counts": RequestCounts(total=batch.num_rows, completed=batch.num_completed, failed=batch.num_failed),
    }
    return BatchObject.model_validate(fields)
