"""`aws SERVICE COMMAND --OPTION VALUE ...` for one operation, from botocore's models as the AWS CLI has them.

The AWS CLI itself cannot be installed next to moto: each pins a release of botocore.
"""

from __future__ import annotations

import sys

import botocore.session
from botocore import xform_name


def main(service: str, command: str, *options: str) -> None:
    """Run one operation; fail on an unknown command or option."""
    client = botocore.session.get_session().create_client(service)
    model = client.meta.service_model
    (operation,) = [name for name in model.operation_names if xform_name(name, "-") == command]
    fields = model.operation_model(operation).input_shape.members
    by_option = {f"--{xform_name(name, '-')}": name for name in fields}
    arguments = {by_option[option]: value for option, value in zip(options[::2], options[1::2], strict=True)}
    numbers = {name: int(value) for name, value in arguments.items() if fields[name].type_name == "integer"}
    getattr(client, xform_name(operation))(**(arguments | numbers))


if __name__ == "__main__":
    main(*sys.argv[1:])
