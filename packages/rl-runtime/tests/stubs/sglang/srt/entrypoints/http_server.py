"""The server: starting it is recorded."""

LAUNCHED: list[list[str]] = []


def launch_server(server_args: list[str]) -> None:
    LAUNCHED.append(server_args)
