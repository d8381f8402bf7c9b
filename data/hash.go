package data

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Hash reads ds and returns the SHA-256 of its elements, in hexadecimal. It covers, for each element, the
// number of tensors, and each tensor's dtype, shape and contents. Workers compare it to check that they train
// on the same data. Hash returns an error if an element contains anything but tensors.
func Hash(ctx context.Context, ds Dataset) (string, error) {
	h := sha256.New()
	for element, err := range ds.Iter(ctx) {
		if err != nil {
			return "", err
		}
		leaves := tensor.Flatten(element)
		hashNumbers(h, len(leaves))
		for _, leaf := range leaves {
			t, ok := leaf.(*tensor.Tensor)
			if !ok {
				return "", fmt.Errorf("data: Hash of a %T: want tensors", leaf)
			}
			hashTensor(h, t)
		}
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// hashTensor writes lengths before contents, so that different tensors give different bytes. A nil tensor is
// an unused optional field.
func hashTensor(h hash.Hash, t *tensor.Tensor) {
	if t == nil {
		hashNumbers(h, -1)
		return
	}
	hashNumbers(h, int(t.DType()), t.Rank())
	hashNumbers(h, t.Shape()...)
	for _, s := range t.StringData() {
		hashNumbers(h, len(s))
		h.Write([]byte(s))
	}
	h.Write(t.Memory().HostBytes())
}

func hashNumbers(h hash.Hash, numbers ...int) {
	var b []byte
	for _, n := range numbers {
		b = binary.LittleEndian.AppendUint64(b, uint64(n))
	}
	h.Write(b)
}
