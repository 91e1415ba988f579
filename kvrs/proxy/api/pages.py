"""Web pages of other sites that may use the clients' port (CORS), as `proxy.allowed_origins` says.

Source: the Fetch standard, "CORS protocol".
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from aiohttp import web
from aiohttp.typedefs import Middleware

from kvrs.config.proxy import ANY_ORIGIN
from kvrs.errors import RequestError
from kvrs.net.direct import DirectRequest, SentResponse, Serve
from kvrs.proxy.api.answers import error_response
from kvrs.proxy.wire.requests import HEADERS_KEY

_METHODS = "GET, POST, DELETE"
_MAX_AGE_S = 600  # A page asks again after it.

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AllowedPages:
    """`origins`: those of the pages, or `*` for all; there is at least one."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def middleware(self) -> Middleware:
        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            headers = self._headers(request.headers)
            wanted = request.headers.get("Access-Control-Request-Method")
            if request.method == "OPTIONS" and wanted is not None:
                return self._preflight(request.headers, headers)
            if not headers:
                return await handler(request)
            request[HEADERS_KEY] = headers
            try:
                response = await handler(request)
            except web.HTTPException as error:
                error.headers.update(headers)
                raise
            if not response.prepared:
                response.headers.update(headers)
            return response

        return middleware

    def direct(self, paths: Mapping[str, Serve]) -> dict[str, Serve]:
        """The same for requests that are served without aiohttp's server."""
        return {path: partial(self._serve, serve) for path, serve in paths.items()}

    async def _serve(self, serve: Serve, request: DirectRequest) -> web.Response | SentResponse:
        if not (headers := self._headers(request.headers)):
            return await serve(request)
        request[HEADERS_KEY] = headers
        response = await serve(request)
        if isinstance(response, web.Response):
            response.headers.update(headers)
        return response

    def _headers(self, given: Mapping[str, str]) -> dict[str, str]:
        """Those of the response; none where the request is of no page that is allowed."""
        origin = given.get("Origin")
        if origin is None:
            return {}
        if ANY_ORIGIN in self._origins:
            allowed = {"Access-Control-Allow-Origin": ANY_ORIGIN}
        elif origin in self._origins:
            allowed = {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
        else:
            return {}
        return allowed | {"Access-Control-Expose-Headers": "*"}

    def _preflight(self, given: Mapping[str, str], headers: Mapping[str, str]) -> web.Response:
        """Answer a browser's preflight before a request of a page: it has no key, and changes
        nothing.
        """
        if not headers:
            refused = RequestError(
                "Origin: this page is not allowed; allowed: those of proxy.allowed_origins",
                status=403,
            )
            return error_response(refused)
        answer = {
            **headers,
            "Access-Control-Allow-Methods": _METHODS,
            "Access-Control-Max-Age": str(_MAX_AGE_S),
        }
        # `*` would not stand for `Authorization`.
        if (names := given.get("Access-Control-Request-Headers")) is not None:
            answer["Access-Control-Allow-Headers"] = names
        return web.Response(headers=answer)
