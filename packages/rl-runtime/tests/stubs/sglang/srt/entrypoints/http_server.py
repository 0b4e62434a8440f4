"""The server: starting it is recorded."""

LAUNCHED = []


def launch_server(server_args):
    LAUNCHED.append(server_args)
