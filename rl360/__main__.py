from rl360.cli import main

raise SystemExit(main())
