package checkpoint

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
)

// FuzzGoMLX reads damaged lists of variables, over the data of a good file.
func FuzzGoMLX(f *testing.F) {
	const entry = `{"ParameterName":"var:/a","Dimensions":[2],"DType":"Float32","Pos":0,"Length":8}`
	f.Add([]byte(`{"Variables":[`+entry+`]}`), []byte("12345678"))
	f.Add([]byte(`{"Variables":[]}`), []byte(gomlxGzip))
	f.Add([]byte(`{"Variables":[{"ParameterName":"var:/b","DType":"Bool","Length":1}]}`), []byte{2})
	f.Fuzz(func(t *testing.T, text, data []byte) {
		var file gomlxFile
		if json.Unmarshal(text, &file) != nil {
			return
		}
		tensors, err := readGoMLX(file, bytes.NewReader(data))
		if err != nil {
			return
		}
		n := 0
		for _, x := range tensors {
			n += x.Value.Memory().Bytes
		}
		if len(tensors) != len(file.Variables) || n != len(data) && !strings.HasPrefix(string(data), gomlxGzip) {
			t.Errorf("%d tensors of %d bytes, from %d bytes", len(tensors), n, len(data))
		}
	})
}
