"""The FastAPI app: all routes behind the middleware. The same in one process and in Ray Serve.

Owns the order of middleware, the addresses of the web pages with the headers that keep foreign code off them, and turns FastAPI's
own errors into `ApiError`.

    >>> uvicorn.run(build_app(backend, KeyFile(Path("keys.json"))))
"""

from importlib.metadata import version
from importlib.util import find_spec
from typing import NoReturn

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

from services import health
from services.backend import ServiceBackend
from services.errors import MCP, ApiError, ClientGone, validation_error
from services.gateway import SECURITY_HEADERS, AuthMiddleware
from services.keys import KeyStore
from services.languagetool import routes as languagetool
from services.metrics import TracingMiddleware
from services.openai import routes as openai_routes
from services.stores import routes as stores
from services.web.pages import PAGES, STATIC, markup

_EXPOSED = ["x-request-id", "retry-after"]
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; frame-src blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
PAGE_HEADERS = SECURITY_HEADERS | {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # browsers ask again each time and get 304 by the ETag
}


def build_app(backend: ServiceBackend, keys: KeyStore) -> FastAPI:
    """The caller closes the backend."""
    app = FastAPI(title="ragspec", version=version("ragspec"), docs_url=None, redoc_url=None, redirect_slashes=False)
    for part in (openai_routes, health, stores, languagetool):  # the busiest are matched first
        app.include_router(part.routes(backend))
    app.include_router(page_routes())
    if find_spec("mcp") is not None:
        from services.mcp import McpRoute

        app.router.routes.append(Route(MCP, McpRoute(backend), methods=["POST"]))
    app.exception_handler(HTTPException)(_raise_http_error)
    app.exception_handler(RequestValidationError)(_raise_validation_error)
    if backend.telemetry is not None:
        app.add_middleware(TracingMiddleware, telemetry=backend.telemetry)
    app.add_middleware(AuthMiddleware, backend=backend, keys=keys)
    if origins := backend.config.service.allowed_origins:  # outermost: browsers send preflight requests without a key
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=_EXPOSED
        )
    return app


async def _raise_http_error(_: Request, error: HTTPException) -> NoReturn:
    """Unknown routes and methods, and errors that FastAPI wrapped while it read a form."""
    if isinstance(error.__cause__, ApiError | ClientGone):
        raise error.__cause__ from None
    raise ApiError(error.status_code, str(error.detail), headers=error.headers) from None


async def _raise_validation_error(_: Request, error: RequestValidationError) -> NoReturn:
    raise validation_error(error.errors()) from None


def page_routes() -> APIRouter:
    """The pages and their files. The pages call the service like any client."""
    router, files = APIRouter(include_in_schema=False), StaticFiles(directory=STATIC)
    pages = {page.path: markup(page) for page in PAGES}

    async def page(request: Request) -> Response:
        return HTMLResponse(pages[request.scope["route"].path], headers=PAGE_HEADERS)

    for path in pages:
        router.add_api_route(path, page, methods=["GET", "HEAD"])

    @router.api_route("/web/{path:path}", methods=["GET", "HEAD"])
    async def static(path: str, request: Request) -> Response:
        try:
            response = await files.get_response(path, request.scope)
        except HTTPException as cause:
            raise HTTPException(404, "there is no such file") from cause
        response.headers.update(PAGE_HEADERS)
        return response

    return router
