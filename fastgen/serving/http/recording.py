"""``GET /recording``: the engine's flight recording, for ``fastgen why``, ``replay`` and ``timeline``."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.exceptions import HTTPException
from starlette.responses import Response

from fastgen.serving.http.errors import ERRORS
from fastgen.serving.http.records import NUMBERS_HEADER, REPLICAS_HEADER
from fastgen.serving.http.shared_query import SharedQueries
from fastgen.serving.service import Service

MEDIA_TYPE = "application/jsonl"
ReplicaId = Annotated[str | None, Query(max_length=256, description="The id of a replica, if the server has several")]
RequestId = Annotated[str | None, Query(max_length=256, description="The id of a request, or of its answer")]


def recording_routes(service: Service) -> APIRouter:
    """Returns the route, for ``service``."""
    router = APIRouter(responses=ERRORS)
    recordings = SharedQueries(service.recording)

    @router.get(
        "/recording",
        response_class=Response,
        responses={200: {"content": {MEDIA_TYPE: {}}, "description": "The recording, as JSON Lines"}},
    )
    async def recording(request: RequestId = None, replica: ReplicaId = None) -> Response:
        """Return the decisions of an engine's last steps. The recording holds no text and no token ids. With
        replicas it is the recording of the one that is named, or else of the first that answered a prompt of the
        request.
        """
        here = {view.id for view in service.engine.replica_views()}
        if replica is not None and replica not in here:
            raise HTTPException(404, f"there is no replica {replica!r:.200} now")
        found_at = [] if request is None else [*map(service.engine.place_of, service.recent.numbers(request))]
        places = [place for place in found_at if place is not None]
        answered = [one for one in dict.fromkeys(place[0] for place in places) if one in here or not one]
        if places and not answered:
            raise HTTPException(404, f"what answered {request!r:.200} is gone, and its recording with it")
        named = replica or (answered[0] if answered else "") or None
        reply, headers = await recordings.take(named), {}
        if request is not None:
            numbers = [reply.request_ids.get(place[1]) for place in places if place[0] == (named or "")]
            found = [str(number) for number in numbers if number is not None]
            if not found:
                raise HTTPException(404, f"no request with the id {request!r:.200} is among the last ones")
            headers[NUMBERS_HEADER] = " ".join(found)
            if answered != [""]:
                headers[REPLICAS_HEADER] = " ".join(answered)
        return Response(reply.recording, headers=headers, media_type=MEDIA_TYPE)

    return router
