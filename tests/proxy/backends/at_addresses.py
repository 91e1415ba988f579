"""Scripted vLLM servers at addresses of loopback, which the tests find by DNS or by pods."""

from contextlib import AsyncExitStack

from kvrs_testkit.scripted_vllm import ScriptedVllm, VllmScript

P2, D2, D3 = "prefill-127.0.0.2", "decode-127.0.0.2", "decode-127.0.0.3"


async def three_servers(
    stack: AsyncExitStack,
) -> tuple[VllmScript, dict[str, ScriptedVllm], dict[str, int]]:
    """One prefill and two decode servers until the stack ends: what they share, themselves by the
    ids of their instances, and the port of each role.
    """
    shared, servers = VllmScript(), dict[str, ScriptedVllm]()
    ports = {"prefill": 0, "decode": 0}
    for name in (P2, D2, D3):
        role, host = name.split("-")
        server = ScriptedVllm(name, name, role=role, script=shared, host=host, port=ports[role])
        await server.start()
        stack.push_async_callback(server.close)
        ports[role], servers[name] = server.port, server
    return shared, servers, ports
