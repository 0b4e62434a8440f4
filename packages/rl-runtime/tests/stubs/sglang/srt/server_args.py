"""Server arguments are kept as they are."""


def prepare_server_args(argv):
    return argv
