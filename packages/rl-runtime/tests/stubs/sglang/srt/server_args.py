"""Server arguments are kept as they are."""


def prepare_server_args(argv: list[str]) -> list[str]:
    return argv
