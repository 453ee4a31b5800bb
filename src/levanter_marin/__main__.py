# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""`python -m levanter_marin COMMAND ...` is `levanter-marin COMMAND ...`."""

import sys

from levanter_marin.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
