# SPDX-License-Identifier: Apache-2.0
"""The one error this tool reports to its user."""

from __future__ import annotations


class ReleaseError(Exception):
    """Something the user can act on; the message says where, what was found and what was wanted."""
