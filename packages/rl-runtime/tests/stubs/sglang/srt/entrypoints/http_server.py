"""The server: starting it is recorded."""

LAUNCHED = []


def launch_server(server_args) -> None:
    LAUNCHED.append(server_args)
