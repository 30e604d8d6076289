# SPDX-License-Identifier: Apache-2.0
"""Measurements, each printing the ratio to a peer taken in the same run."""

from __future__ import annotations
