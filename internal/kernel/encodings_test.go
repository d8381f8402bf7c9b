package kernel

import (
	"bytes"
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// TestEncodings compares the instructions for arm64 that Go's assembler does not know, and which are written as words,
// with what the GNU assembler makes of their names. It knows those of ARMv8.0 only, so none needs a newer processor.
func TestEncodings(t *testing.T) {
	const prefix = "aarch64-linux-gnu-"
	for _, tool := range []string{"as", "objcopy"} {
		if _, err := exec.LookPath(prefix + tool); err != nil {
			t.Skipf("%s is not installed (Debian: binutils-aarch64-linux-gnu)", prefix+tool)
		}
	}
	var source []byte
	for _, folder := range []string{".", "../../backend/internal/product", "../../backend/internal/vector"} {
		text, err := os.ReadFile(filepath.Join(folder, "neon_arm64.s"))
		if err != nil {
			t.Fatal(err)
		}
		source = append(source, text...)
	}
	matches := regexp.MustCompile(`(?m)^\tWORD \$0x([0-9a-f]{8}) // (.+)$`).FindAllSubmatch(source, -1)
	if all := bytes.Count(source, []byte("WORD")); len(matches) == 0 || len(matches) < all {
		t.Fatalf("%d of %d words have a name", len(matches), all)
	}
	var names []string
	var words []uint32
	for _, m := range matches {
		w, err := strconv.ParseUint(string(m[1]), 16, 32)
		if err != nil {
			t.Fatal(err)
		}
		names, words = append(names, string(m[2])), append(words, uint32(w))
	}
	folder := t.TempDir()
	object, text := filepath.Join(folder, "object"), filepath.Join(folder, "text")
	run := func(stdin string, command ...string) {
		t.Helper()
		c := exec.Command(prefix+command[0], command[1:]...)
		c.Stdin = strings.NewReader(stdin)
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", command, err, out)
		}
	}
	run(strings.Join(names, "\n")+"\n", "as", "-march=armv8-a", "-o", object)
	run("", "objcopy", "-O", "binary", "--only-section=.text", object, text)
	assembled, err := os.ReadFile(text)
	if err != nil {
		t.Fatal(err)
	}
	if len(assembled) != 4*len(words) {
		t.Fatalf("%d words make %d bytes", len(words), len(assembled))
	}
	for i, w := range words {
		if want := binary.LittleEndian.Uint32(assembled[4*i:]); w != want {
			t.Fatalf("%q is %#08x, want %#08x", names[i], w, want)
		}
	}
	t.Logf("%d instructions", len(words))
}
