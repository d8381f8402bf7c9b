//go:build unix

package launch

import (
	"path/filepath"
	"strings"
	"testing"
)

// TestNativeCrash: a worker that crashes in native code is a root cause by its signal. The report has the lines that
// it wrote before the crash, without the registers.
func TestNativeCrash(t *testing.T) {
	for name, want := range map[string][]string{
		"sigabrt.txt": {
			"  what    SIGABRT: abort, in native code: F0000 00:00:1763812345.123456    1234 buffer.cc:57] Check failed: " +
				"size >= 0",
			"  code    2\n",
			"*** Check failure stack trace: ***\n              @     0x7f1  tsl::x()\n          SIGABRT: abort\n",
			"main._Cfunc_ab()",
		},
		"sigsegv.txt": {
			"  what    SIGSEGV: segmentation violation, in native code; the line before: warning 1\n",
			"  stack   warning 1\n          SIGSEGV: segmentation violation\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			file, err := filepath.Abs(filepath.Join("testdata", name))
			if err != nil {
				t.Fatal(err)
			}
			s := launchScript(t,
				`echo "warning $RANK" >&2; [ $RANK = 1 ] && cat '`+file+`' >&2 && exit 2; while :; do sleep 0.02; done`, nil)
			o := s.wait(t)
			if o.Code != 2 || o.Report == nil || o.Report.Root.Worker != 1 || o.Report.Root.Kind != "signal" {
				t.Errorf("outcome %+v, report %+v", o, o.Report)
			}
			_, block, _ := strings.Cut(s.err.String(), "lockstep run: the job failed; root cause: worker 1\n")
			for _, want := range want {
				if !strings.Contains(block, want) {
					t.Errorf("not said: %q in\n%s", want, block)
				}
			}
			if strings.Contains(block, "rflags") || strings.Contains(block, "  stderr") {
				t.Errorf("what it wrote at its end is shown:\n%s", block)
			}
		})
	}
}
