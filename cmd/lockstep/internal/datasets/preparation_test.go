package datasets

import (
	"strings"
	"testing"
)

// TestPreparationErrors checks that metadata that do not fit the run are refused.
func TestPreparationErrors(t *testing.T) {
	for _, test := range []struct{ data, loss, text, want string }{
		{"images", "", `{"shape": [8, 8], "classes": 2}`, "shape [8 8]"},
		{"images", "", `{"shape": [8, 8, 2], "classes": 2}`, "2 channels"},
		{"images", "", `{"shape": [8, -8, 3], "classes": 2}`, "shape [8 -8 3]"},
		{"digits", "", `{"shape": [8, 8, 1]}`, "0 classes"},
		{"images", "", `{"shape": [8, 8, 3], "classes": 1, "names": ["a", "b"]}`, "1 classes with 2 names"},
		{"csv", "", `{"shape": [2], "classes": 2, "columns": [{"name": "a", "deviation": 1}]}`, "1 numbers"},
		{"csv", "", `{"shape": [1], "classes": 2, "columns": [{"name": "a"}]}`, "deviation 0"},
		{"csv", "mse", `{"shape": [1], "classes": 2}`, "regression, false"},
		{"csv", "mse", `{"shape": [1], "regression": {"loss": "mse", "mean": 1, "deviation": 0}}`, "deviation 0"},
		{"text", "", `{"shape": 3}`, "cannot unmarshal"},
	} {
		d := &Flags{Name: test.data, loss: test.loss}
		_, err := PreparationOf(map[string]string{PreparationKey: test.text}, d)
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q in it", test.text, err, test.want)
		}
	}
}
