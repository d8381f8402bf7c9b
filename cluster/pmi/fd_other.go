//go:build !unix

package pmi

import (
	"errors"
	"os"
)

func duplicate(int) (*os.File, error) { return nil, errors.ErrUnsupported }

func blocking(int) error { return nil }
